"""Allocations of Inductor's kernels, read from the code it generates."""

import math
import re
from functools import partial

import pytest
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from kvpass.codec.pages import dequantize_pages
from kvpass.codec.tensors import Pack
from kvpass.lowering import reference
from kvpass.lowering.call_types import AttendCall
from kvpass.lowering.inductor import attend as inductor_attend
from kvpass.lowering.inductor.aot import Input, Program, compile_ahead

from common import coded, dense_call, randn, state_of

pytestmark = pytest.mark.slow

HEADS, Q_HEADS, DIM, PAGES, PAGE = 2, 4, 64, 1000, 32
SPECS = coded(2, "channel", PAGE, PAGE), coded(2, "token", 32, PAGE, residual=PAGE)


def allocations(run) -> list[tuple[int, str]]:
    """Number of elements and dtype of each tensor that the compiled kernel ``run`` allocates, when called with `PAGES`
    pages."""
    with config.patch(fx_graph_cache=False):  # a cached kernel would show no code
        _, codes = run_and_get_code(run)
    found = []
    for shape, dtype in re.findall(r"= empty_strided\w*\(\((.*?)\), \(.*?\), torch\.(\w+)\)", codes[-1]):
        sizes = re.sub(r"\bs\d+\b", str(PAGES), shape)
        found.append((math.prod(eval(f"({sizes})")), dtype))
    return found


def attend(specs, n=200):
    """`attend` of one query token over ``n`` tokens, compiled again."""
    inductor_attend.attend_kernel.cache_clear()
    states = [state_of(spec, randn(i, 1, HEADS, n, DIM), room=n) for i, spec in enumerate(specs)]
    packed = [Pack.of(state.pack, state.spec) for state in states]
    q, k_new, v_new = (randn(5 + i, 1, heads, 1, DIM) for i, heads in enumerate((Q_HEADS, HEADS, HEADS)))
    return inductor_attend.attend(AttendCall(q, *packed, n, k_new, v_new, None, False, 0.1, 0.0, *specs))


def decode_then_attend(specs):
    """The same over pages alone, as the reference computes it."""
    states = [state_of(spec, randn(i, 1, HEADS, 200, DIM), room=200) for i, spec in enumerate(specs)]
    pools = [pool[:, :, :5].contiguous() for state in states for pool in (state.codes, state.scale, state.zero_point)]

    def run(q, *pools):
        k, v = (dequantize_pages(*three, spec) for three, spec in zip((pools[:3], pools[3:]), specs, strict=True))
        return (reference.attention(dense_call(q, k, v, scale=0.1), k, v),)

    tensors = randn(5, 1, Q_HEADS, 1, DIM), *pools
    inputs = [Input(f"input_{i}", tensor, [2] if i else []) for i, tensor in enumerate(tensors)]
    return compile_ahead(Program(run, inputs))(*tensors)


def test_attend_allocates_no_dequantized_keys_and_copies_no_pool(monkeypatch):
    """Scores are the largest tensor: one per query head and token. By Inductor, which runs attention with masks."""
    made = allocations(partial(attend, SPECS))
    assert max(elements for elements, _ in made) <= Q_HEADS * (PAGES * PAGE + 200)
    assert {dtype for _, dtype in made} <= {"float32", "int64", "bool"}


def test_dequantizing_first_would_be_detected():
    made = allocations(partial(decode_then_attend, SPECS))
    assert max(elements for elements, _ in made) >= HEADS * PAGES * PAGE * DIM
