"""Stores tokens: one launch writes the tokens of a step to the windows of all layers."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.allocation import Allocation
from kvpass.codec.layer_pages import LayerPages
from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.token_ranks import Ranked
from kvpass.layout.retention import Retention
from kvpass.layout.window import on_device

from .. import reference
from ..append import APPENDED, PER_CHANNEL_BITS, append, append_layers, write_each
from ..call_types import AppendCall, AppendLayersCall
from ..table import DispatchKey, implements
from .configs import INTERPRETED, cdiv, power_of_two, refuses_device
from .quantize import QUANTIZED, quantize, refuses
from .quantize_shares import quantize as quantize_layer_pages

_FITTED = PER_CHANNEL_BITS | {"page_rope", "numbered"}
"""Features of specs with per-channel bit widths: a kernel stores their tokens. Their pages are quantized by another, if
they hold all heads of a layer, and by PyTorch otherwise."""
_TOKENS = 16  # per program
_LAYERS = 64  # per launch: pointers are arguments, which are limited to 4 KB


@triton.jit
def _of_layer(tensors, layer):
    """The pointer of ``layer`` among ``tensors``."""
    found = tensors[0].to(tl.int64)
    for i in tl.static_range(1, len(tensors)):
        found = tl.where(layer == i, tensors[i].to(tl.int64), found)
    return found.to(tensors[0].dtype)


@triton.jit(do_not_specialize=["xs", "rings", "count"])
def write_windows(
    xs, rings, length, count, x_batch, x_head, x_token, HEADS: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the ``count`` new tokens ``xs`` of each layer to its ring in ``rings``, after ``length`` stored tokens.

    Grid: runs of tokens of all heads of all samples; layers. Tokens whose slot is overwritten in the same call are
    skipped.
    """
    runs, n = tl.cdiv(count, TOKENS), tl.load(length)
    layer, lead = tl.program_id(1), (tl.program_id(0) // runs).to(tl.int64)
    x, ring = _of_layer(xs, layer), _of_layer(rings, layer) + lead * (SINKS + WINDOW) * DIM
    new = (tl.program_id(0) % runs).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # with strides it may exceed 32 bits
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    token = n + new
    slot = tl.where(token < SINKS, token, SINKS + (token - SINKS) % WINDOW)
    stays = (new < count) & ((token < SINKS) | (token + WINDOW >= n + count))
    in_bounds = stays[:, None] & (channel < DIM)[None, :]
    at = lead // HEADS * x_batch + lead % HEADS * x_head + new[:, None] * x_token + channel[None, :]
    tl.store(ring + slot[:, None] * DIM + channel[None, :], tl.load(x + at, mask=in_bounds), mask=in_bounds)


def _write(
    rings: Sequence[Tensor], n: int, xs: Sequence[Tensor], retention: Retention, length: Tensor | None = None
) -> None:
    """Write tokens ``[B, H, S, D]`` of layers to their rings, in the slots of `kvpass.layout.window.RecentLayout`.

    The number of stored tokens is read from ``length``, and pointers are arguments. Nothing is copied from the host, so
    a captured launch is correct at other lengths.
    """
    alike: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
    for ring, x in zip(rings, xs, strict=True):
        x = x.to(ring.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        alike.setdefault((x.shape, x.stride(), x.dtype), []).append((x, ring))
    length = on_device(length, n, xs[0].device)
    for ((batch, heads, count, head_dim), strides, _), layers in alike.items():
        tokens = min(_TOKENS, triton.next_power_of_2(count))
        with torch.cuda.device_of(xs[0]):
            for first in range(0, len(layers), _LAYERS):
                new, into = zip(*layers[first : first + _LAYERS], strict=True)
                write_windows[batch * heads * cdiv(count, tokens), len(new)](
                    new, into, length, count, *strides[:3], heads, head_dim, retention.sinks, retention.ring_size,
                    tokens, enable_fp_fusion=False,
                )  # fmt: skip


def _encoder(spec: CodecSpec) -> Callable[..., tuple[Tensor, ...]]:
    if isinstance(spec.codec, LayerPages):
        return quantize_layer_pages
    return reference.quantize if isinstance(spec.codec, Allocation) else quantize


def _refuses(dispatch: DispatchKey) -> str | None:
    (spec,) = map(parse, dispatch.specs)
    if not isinstance(spec.codec, Ranked):
        return refuses(dispatch)
    if isinstance(spec.codec, LayerPages) and not power_of_two(spec.page_size):
        return f"page_size must be a power of two, not {spec.page_size}."
    return refuses_device(dispatch)


@implements("append_", "triton", has=(QUANTIZED | APPENDED | _FITTED,), refuses=_refuses, by_name_only=INTERPRETED)
def append_(call: AppendCall) -> None:
    append(_encoder(call.spec), call, _write if call.spec.retention.keep == "recent" else write_each)


@implements(
    "append_layers_", "triton", has=(QUANTIZED | {"pre_rope", "center"} | _FITTED,), refuses=_refuses,
    by_name_only=INTERPRETED,
)  # fmt: skip
def append_layers_(call: AppendLayersCall) -> None:
    append_layers(_encoder(call.spec), call, _write)
