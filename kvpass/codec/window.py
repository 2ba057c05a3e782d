"""Where a token lives: sinks, then a ring of full-precision tokens. Pure index arithmetic."""

import torch
from torch import Tensor

from .spec import CodecSpec

LENGTH_OFFSET = 1 << 20
"""A cache of n tokens hands its length to a graph as the *shape* of a zero-stride view, n + LENGTH_OFFSET long, of one
int64 that holds n. The shape makes n a symbolic int (one graph for every length, slices instead of masks); the value
is there for device kernels. The offset keeps 0 and 1 from being specialised and n from being unified with other dims.
"""


def length_view(value: Tensor, n: int) -> Tensor:
    """The carrier of length ``n``: a zero-stride view of ``value`` (int64, one element), which must hold n."""
    return value.expand(n + LENGTH_OFFSET)


def length_of(carrier: Tensor) -> int:
    """The length a `length_view` carries; symbolic under tracing, never a device read."""
    return carrier.shape[0] - LENGTH_OFFSET


def ring_slots(spec: CodecSpec, start: int, stop: int, device=None) -> Tensor:
    """Slots of tokens ``[start, stop)``, none of them a sink."""
    return spec.sinks + torch.arange(start - spec.sinks, stop - spec.sinks, device=device) % spec.window


def read_window(ring: Tensor, spec: CodecSpec, start: int, stop: int) -> Tensor:
    """Tokens ``[start, stop)`` of ``[B, H, sinks + window, D]``, in token order."""
    return ring.index_select(2, ring_slots(spec, start, stop, ring.device))


def write_window(ring: Tensor, spec: CodecSpec, start: int, x: Tensor) -> None:
    """Store ``x`` ``[B, H, S, D]`` as tokens ``[start, start + S)``: sinks in their slots, the newest in the ring."""
    stop = start + x.shape[2]
    if start < spec.sinks:
        last_sink = min(stop, spec.sinks)
        ring[:, :, start:last_sink] = x[:, :, : last_sink - start]
    first = max(start, spec.sinks, stop - spec.window)
    while first < stop:  # at most twice: up to the end of the ring, and on from its beginning
        slot = (first - spec.sinks) % spec.window
        last = min(stop, first + spec.window - slot)
        ring[:, :, spec.sinks + slot :][:, :, : last - first] = x[:, :, first - start : last - start]
        first = last
