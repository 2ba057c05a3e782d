"""Sliding windows in attention: stored tokens behind the window are hidden by a mask or by row starts, which
implementations of ``kvpass::attend`` serve anyway."""

import torch
from torch import Tensor

from kvpass.errors import KVPassError

_ON_DEVICE = ("cuda",)  # where single-token steps take row starts, read from the length tensor, instead of a mask


def window_as(device: str, queries: int) -> str:
    """The argument of ``kvpass::attend`` that expresses a window if there is no mask: "starts" or "mask"."""
    return "starts" if device in _ON_DEVICE and queries == 1 else "mask"


def within_window(
    span: int, n: int, q: Tensor, mask: Tensor | None, causal: bool, starts: Tensor | None, length: Tensor
) -> tuple[Tensor | None, bool, Tensor | None]:
    """``mask``, ``causal`` and ``starts`` of ``kvpass::attend`` that also hide the stored tokens which a layer with a
    sliding window of ``span`` tokens no longer returns: those behind the window of the first query. ``n`` tokens are
    stored, and ``length`` holds the same number on the device. Raises `KVPassError` for row starts."""
    queries = q.shape[2]
    if starts is not None:
        raise KVPassError("attend takes a mask, not row starts, for layers with a sliding window.")
    if not n:
        return mask, causal, None
    if mask is None and window_as(q.device.type, queries) == "starts":
        return None, causal, (length[:1] - (span - 1)).clamp_min(0).expand(len(q)).contiguous()
    columns = torch.arange(n + queries, device=q.device)
    seen = (columns > n - span).view(1, 1, 1, -1)
    if mask is None:
        rows = torch.arange(n, n + queries, device=q.device).view(-1, 1)
        return seen & (columns <= rows) if causal and queries > 1 else seen, False, None
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf), False, None
