"""The exceptions of kvpass. Every message says what to do instead."""

from typing import Any


class KVPassError(ValueError):
    """The request cannot be fulfilled; nothing was changed."""


class NotFusedError(KVPassError):
    """``strict=True`` and an attention layer could not be lowered to the fused op."""


class NotCapturedError(KVPassError):
    """A forward cannot be captured as a graph, or its graph lacks what a scheme needs. The message is a clause that
    gives the reason; ``__cause__`` is the exception of torch, if there was one. ran: whether a part of the forward may
    have run before."""

    ran = True


class NeedsGraphError(KVPassError):
    """A scheme needs the graph of a call that cannot be captured. instead: a scheme of this model that needs none."""

    def __init__(self, message: str, instead: Any):
        super().__init__(message)
        self.instead = instead


class NotSimulatedError(KVPassError):
    """One pass over a text does not determine what the scheme stores, or the model cannot be simulated."""


class NonFiniteError(KVPassError):
    """NaN or infinity reached a quantizer."""
