"""Triton attention over pages with calibrated bit widths (run as in `test_triton`), against the reference."""

import pytest
import torch
from test_by_head import DIM, HEADS, plan_of, recalling, stored
from test_shares import states
from test_triton_fields import DEVICE, assert_dequantized_as_the_reference, assert_is_a_rounding_of_the_reference

from kvpass.codec.layer_pages import high_precision_masks
from kvpass.codec.pages import quantize_pages
from kvpass.codec.shares import Shares
from kvpass.codec.tensors import of_state
from kvpass.lowering.triton.quantize_shares import quantize
from kvpass.schemes import LayerGeometry, get

from common import generator, randn
from test_allocation import mixed

CALLS = {
    "static": {},
    "hybrid": dict(form="hybrid"),
    "interleaved, wide": dict(dim=128, rope="interleaved-64", heads=1, repeats=4, batch=1),
    "all tokens alike": dict(ranked=False, n=131),
    "some channels turned, mask": dict(rope="half-8", mask="bool"),
    "no positions, bias, softcap": dict(rope="", mask="float", softcap=3.0),
    "narrow heads, three queries": dict(dim=16, rope="half-8", queries=3),
    "hybrid, long pages": dict(form="hybrid", dim=48, rope="half-24", residual=64, n=420),
    "bfloat16": dict(dtype=torch.bfloat16, batch=1),
    "hybrid, float16": dict(form="hybrid", dtype=torch.float16, repeats=1),
    "no pages": dict(n=90),
}


def call(
    dim=32, heads=2, repeats=2, batch=2, n=230, queries=1, rope="half-16", dtype=torch.float32, mask="", softcap=0.0,
    **fields,
):  # fmt: skip
    """Arguments and keyword arguments of `kvpass::attend`."""
    geometry = LayerGeometry(0, 1, heads, dim, dtype, torch.device("cpu"))
    plan = get("waterfill-static", **{"ropes": (rope,), **fields}).plan(geometry)
    key, value, _, k, v = states(plan, (batch, heads, repeats, dim), dtype, n, n + queries)
    q, bias = randn(8, batch, heads * repeats, queries, dim, dtype=dtype) / 4, None
    if mask:
        seen = torch.rand(batch, 1, queries, n + queries, generator=generator(7)) > 0.3
        seen[..., -1] = True
        bias = seen if mask == "bool" else randn(9, batch, 1, queries, n + queries).masked_fill(~seen, -1e38)
    packs = [[t if name == "share" else t.to(DEVICE) for name, t in named(state)] for state in (key, value)]
    new = [x[:, :, n:].contiguous() for x in (k, v)]
    tables = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in key.tables().items()}
    given = [
        q, *packs, key.length_tensor(n), *new, bias, not mask and queries > 1, dim**-0.5, softcap, key.text, value.text,
    ]  # fmt: skip
    return [one.to(DEVICE) if isinstance(one, torch.Tensor) else one for one in given], tables


def named(state):
    return zip(of_state(state.spec), state.pack, strict=True)


@pytest.mark.parametrize("name", CALLS)
def test_attention_over_calibrated_widths_equals_the_reference(name):
    assert_is_a_rounding_of_the_reference(*call(**CALLS[name]))


@pytest.mark.parametrize("name", ["static", "hybrid", "interleaved, wide", "narrow heads, three queries", "float16"])
def test_pages_are_dequantized_as_by_the_reference(name):
    assert_dequantized_as_the_reference(*call(**CALLS["hybrid, float16" if name == "float16" else name]))


@pytest.mark.parametrize(
    ("form", "ranked", "size", "dim"), [("static", True, 32, 64), ("hybrid", True, 16, 48), ("static", False, 16, 32)]
)
def test_the_kernel_makes_the_pages_of_the_reference(form, ranked, size, dim):
    """Bit for bit, but for a few codes: gains are powers of two that kernels and PyTorch may round differently."""
    geometry = LayerGeometry(0, 1, 3, dim, torch.float32, torch.device("cpu"))
    plan = get("waterfill-static", form=form, ranked=ranked, residual=size, recent=0, ropes=("",)).plan(geometry)
    key, value, *_ = states(plan, (2, 3, 1, dim), torch.float32, 4 * size + 8)
    for state in (key, value):
        fitted = dict(named(state))
        given = [fitted[name] for name in Shares.quantizes_with if name in fitted]
        if state is value and ranked:
            given.append(high_precision_masks(key.codes[:, :, 1:4], size, 3))
        assert_makes_the_pages_of_the_reference(randn(11, 2, 3, 3 * size, dim), given, state.spec)


def test_the_kernel_makes_pages_with_bits_by_head():
    """The layout varies by sample."""
    chosen = None
    for state in stored(plan_of(), *recalling(2, 200, [0, 2])):
        given = [state.basis, state.widths, state.queries if chosen is None else chosen]
        assert_makes_the_pages_of_the_reference(mixed(1, 2, HEADS, 48, DIM), given, state.spec)
        chosen = high_precision_masks(state.codes[:, :, 1:4], state.spec.page_size, HEADS)


def assert_makes_the_pages_of_the_reference(x, given, spec):
    (expected,) = quantize_pages(x, spec, given)
    placed = [one if one.dtype == torch.int32 else one.to(DEVICE) for one in given]  # a share is on the host
    (got,) = quantize(x.to(DEVICE), placed, spec)
    assert got.shape == expected.shape and (got.cpu() != expected).float().mean() < 0.002
