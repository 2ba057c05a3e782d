"""Synthetic calibration results for layers whose bits a calibration allocates: heads of any bit widths, with correlated
channels."""

import torch

from kvpass.cache.state import ModelTensors
from kvpass.codec.layer_pages import share_of
from kvpass.codec.probes import QUERIES
from kvpass.codec.rope import parse_rope
from kvpass.codec.shares import Shares
from kvpass.codec.tensors import of_model
from kvpass.codec.transform_coding import WIDEST

from common import generator, randn


def shared_tensors(spec, heads, head_dim, seed=0, dtype=torch.float16):
    """The tensors that `of_model` names for ``spec``; angles come first for page-relative RoPE by token numbers. The
    last head has no bits of the last rank."""
    shares = Shares.of(spec)
    widths = torch.randint(0, WIDEST + 1, (heads, shares.ranks, head_dim), generator=generator(seed))
    widths[torch.rand(widths.shape, generator=generator(seed + 1)) < 0.4] = 0
    widths[-1, -1] = 0
    size = shares.block_size
    basis = torch.linalg.qr(randn(seed + 2, heads, head_dim // size, size, size)).Q * 1.5
    found = {
        "share": share_of(widths),
        "center": randn(seed + 3, 1, heads, 1, head_dim).to(dtype),
        "metric": torch.eye(size).repeat(heads, head_dim // size, 1)[None].to(dtype),
        "basis": basis.flatten(1, 2)[None].to(dtype),
        "widths": widths[None].to(torch.uint8),
        "steps": torch.full(widths.shape, 0.5)[None].to(dtype),
        "queries": (randn(seed + 4, 1, heads, QUERIES, head_dim) / (4 * head_dim**0.5)).to(dtype),
    }
    rope = spec.transform.numbered
    pairs = parse_rope(rope)[0] if rope else 0
    angles = [100.0 ** (-torch.arange(pairs) / pairs)] if rope else []
    return ModelTensors([*angles, *(found[name] for name in of_model(spec))])
