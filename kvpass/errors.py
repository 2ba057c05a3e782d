"""The one exception family of kvpass: every message says what to do instead."""


class KVPassError(ValueError):
    """Something the user asked for cannot be done; nothing was changed."""


class NotFusedError(KVPassError):
    """``strict=True`` and an attention layer could not be lowered to the fused op."""


class NotCapturedError(KVPassError):
    """A forward has no graph, or one without what a scheme looks for in it. The message is why, as a clause;
    ``__cause__`` is what torch raised, if it was torch."""


class NotSimulatedError(KVPassError):
    """A scheme whose storage depends on more than one pass over a text can see."""


class NonFiniteError(KVPassError):
    """NaN or infinity reached a quantizer."""
