"""Handles of pools: a view of static shape from which ops recover the whole pool."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass import KVPassError
from kvpass.cache.state import KVState
from kvpass.compile import normalise
from kvpass.layout.pool import handle, whole

from common import coded, randn
from tiny import llama, tokens

KEYS, VALUES = coded(2, "channel", 16, 16), coded(2, "token", 16, 16, 16)
sizes = st.integers(1, 4)


@given(batch=sizes, heads=sizes, capacity=sizes, page=st.tuples(st.integers(0, 3), sizes), half=st.booleans())
def test_handles_resolve_to_their_pool(batch, heads, capacity, page, half):
    pool = torch.randn(batch, heads, capacity, *page).to(torch.float16 if half else torch.float32)
    small = handle(pool)
    assert small.shape == (batch, heads, *page)
    found = whole(small, capacity)
    assert found.shape == pool.shape and found.stride() == pool.stride()
    assert found.data_ptr() == pool.data_ptr() and torch.equal(found, pool)


def test_pages_beyond_32_bits_are_where_their_handle_says():
    pages = (1 << 31) // 64 + 5  # of 64 bytes: each head has more than 2^31
    pool = torch.empty(2, 3, pages, 4, 16, dtype=torch.uint8, device="meta")
    found = whole(handle(pool), pages)
    assert found.shape == pool.shape and found.stride() == pool.stride()
    assert found[1, 2, pages - 1].storage_offset() == (6 * pages - 1) * 64 == pool[1, 2, pages - 1].storage_offset()


def test_a_copy_of_a_handle_is_refused():
    small = handle(torch.zeros(2, 3, 4, 8, 16))
    with pytest.raises(KVPassError, match="a copy of the pages"):
        whole(small.clone(), 4)


@pytest.mark.slow_cases("inductor")
@pytest.mark.parametrize("lowering", ["reference", "inductor"])
def test_attention_finds_pools_by_their_handles_and_refuses_copies(lowering):
    states = [KVState.allocate(spec, 2, 2, 32, torch.float32, "cpu", 200) for spec in (KEYS, VALUES)]
    for seed, state in enumerate(states):
        state.append(randn(seed, 2, 2, 150, 32), 0)
    new, q = randn(3, 2, 2, 1, 32), randn(4, 2, 4, 1, 32)

    def attend(pools):
        packed = [[*pools(state), state.ring] for state in states]
        rest = states[0].length_tensor(150), new, new, None, False, 0.2, 0.0, states[0].text, states[1].text
        return torch.ops.kvpass.attend(q, *packed, *rest, lowering)[0]

    expected = attend(lambda state: (state.codes, state.scale, state.zero_point))
    assert torch.equal(attend(lambda state: state.handles[:3]), expected)
    with pytest.raises(KVPassError, match="a copy of the pages"):
        attend(lambda state: [small.clone() for small in state.handles[:3]])


def test_the_length_is_all_that_varies_in_a_decode_graph(monkeypatch):
    """Every symbolic input costs tracing time in every layer (benchmarks/cold_start.py)."""
    graphs, run = [], normalise.aot_export_module

    def spy(gm, inputs, **options):
        graphs.append([x for x in inputs if isinstance(x, torch.SymInt)])
        return run(gm, inputs, **options)

    monkeypatch.setattr(normalise, "aot_export_module", spy)
    model = kvpass.apply(llama(), {"scheme": "kivi", "group_size": 16, "residual": 16}, lowering="reference")
    model.generate(tokens(1, 40), max_new_tokens=3, do_sample=False)
    assert [len(symbols) for symbols in graphs] == [1]
