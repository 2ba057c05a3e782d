"""Storing tokens: those of a step go to the windows of all layers in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.kept import Pack
from kvpass.codec.spec import CodecSpec
from kvpass.layout.retention import Retention

from ..append import APPENDED, append, append_layers
from ..table import implements
from .configs import INTERPRETED, cdiv
from .encode import ENCODED, encode, refuses

_TOKENS = 16  # of a program


@triton.jit(do_not_specialize=["n", "count"])
def write_windows(
    addresses, n, count, x_batch, x_head, x_token, HEADS: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Grid: runs of tokens of all heads of all samples, layers. ``addresses`` are those of each layer's ``count`` new
    tokens and of its ring. Tokens whose slot is taken again are left out."""
    runs = tl.cdiv(count, TOKENS)
    layer, lead = tl.program_id(1), (tl.program_id(0) // runs).to(tl.int64)
    x = tl.load(addresses + 2 * layer).to(tl.pointer_type(DTYPE))
    ring = tl.load(addresses + 2 * layer + 1).to(tl.pointer_type(DTYPE)) + lead * (SINKS + WINDOW) * DIM
    new = (tl.program_id(0) % runs).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # times a stride it may exceed 32 bits
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    token = n + new
    slot = tl.where(token < SINKS, token, SINKS + (token - SINKS) % WINDOW)
    stays = (new < count) & ((token < SINKS) | (token + WINDOW >= n + count))
    there = stays[:, None] & (channel < DIM)[None, :]
    at = lead // HEADS * x_batch + lead % HEADS * x_head + new[:, None] * x_token + channel[None, :]
    tl.store(ring + slot[:, None] * DIM + channel[None, :], tl.load(x + at, mask=there), mask=there)


def _write(rings: Sequence[Tensor], n: int, xs: Sequence[Tensor], retention: Retention) -> None:
    """Store tokens ``[B, H, S, D]`` of layers in their rings, from slot to slot as `kvpass.layout.window.Recent`."""
    alike: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
    for ring, x in zip(rings, xs, strict=True):
        x = x.to(ring.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        alike.setdefault((x.shape, x.stride(), x.dtype), []).append((x, ring))
    device = xs[0].device
    pinned = device.type == "cuda"  # so that the host does not wait
    for ((batch, heads, count, head_dim), strides, dtype), layers in alike.items():
        addresses = torch.tensor([(x.data_ptr(), ring.data_ptr()) for x, ring in layers], pin_memory=pinned)
        tokens = min(_TOKENS, triton.next_power_of_2(count))
        grid = batch * heads * cdiv(count, tokens), len(layers)
        with torch.cuda.device_of(xs[0]):
            write_windows[grid](
                addresses.to(device, non_blocking=True), n, count, *strides[:3], heads, head_dim,
                retention.sinks, retention.ring_size, tokens, _DTYPES[dtype],
                enable_fp_fusion=False,
            )  # fmt: skip


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@implements("append_", "triton", has=(ENCODED | APPENDED,), refuses=refuses, by_name_only=INTERPRETED)
def append_(*args) -> None:
    append(encode, *args)


@implements("append_layers_", "triton", has=(ENCODED | {"pre_rope"},), refuses=refuses, by_name_only=INTERPRETED)
def append_layers_(packs: Sequence[Pack], n: int, xs, spec: CodecSpec) -> None:
    append_layers(encode, packs, n, xs, spec, _write)
