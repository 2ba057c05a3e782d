"""The one exception family of kvpass: every message says what to do instead."""


class KVPassError(ValueError):
    """Something the user asked for cannot be done; nothing was changed."""


class NotFusedError(KVPassError):
    """``strict=True`` and an attention layer could not be lowered to the fused op."""


class NotSimulatedError(KVPassError):
    """A scheme whose storage depends on more than one pass over a text can see."""


class NonFiniteError(KVPassError):
    """NaN or infinity reached a quantizer."""
