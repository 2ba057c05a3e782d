"""Handles of pools: a view of static shape that ops find the whole pool from."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass import KVPassError
from kvpass.codec.pool import handle, whole
from kvpass.graph import normalise

from tiny import llama, tokens

sizes = st.integers(1, 4)


@given(batch=sizes, heads=sizes, capacity=sizes, page=st.tuples(st.integers(0, 3), sizes), half=st.booleans())
def test_a_handle_leads_back_to_its_pool(batch, heads, capacity, page, half):
    pool = torch.randn(batch, heads, capacity, *page).to(torch.float16 if half else torch.float32)
    small = handle(pool)
    assert small.shape == (batch, heads, *page)
    found = whole(small, capacity)
    assert found.shape == pool.shape and found.stride() == pool.stride()
    assert found.data_ptr() == pool.data_ptr() and torch.equal(found, pool)


def test_a_copy_of_a_handle_is_refused():
    small = handle(torch.zeros(2, 3, 4, 8, 16))
    with pytest.raises(KVPassError, match="copy of packed pages"):
        whole(small.clone(), 4)


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
