"""The one exception family of kvpass: every message says what to do instead."""

from typing import Any


class KVPassError(ValueError):
    """Something the user asked for cannot be done; nothing was changed."""


class NotFusedError(KVPassError):
    """``strict=True`` and an attention layer could not be lowered to the fused op."""


class NotCapturedError(KVPassError):
    """A forward has no graph, or one without what a scheme looks for in it. The message is why, as a clause;
    ``__cause__`` is what torch raised, if it was torch."""


class NeedsGraphError(KVPassError):
    """A scheme needs the graph of a call that cannot be captured. instead: a scheme that works for this model without,
    or None."""

    def __init__(self, message: str, instead: Any = None):
        super().__init__(message)
        self.instead = instead


class NotSimulatedError(KVPassError):
    """A scheme whose storage depends on more than one pass over a text can see."""


class NonFiniteError(KVPassError):
    """NaN or infinity reached a quantizer."""
