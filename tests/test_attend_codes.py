"""The kernel in C++ for codes with scales by channel and by token, against the reference."""

import pytest
import torch

from kvpass.cache.state import KVState
from kvpass.lowering.cpp import attend_codes
from kvpass.schemes import LayerGeometry, get

from common import randn

CPU = torch.device("cpu")


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize(
    ("scheme", "dtype", "batch", "heads", "queries", "dim"),
    [
        ("kivi", torch.float32, 2, 3, 3, 64),
        ("kivi-sinks", torch.bfloat16, 1, 2, 8, 32),
        ("kivi-4", torch.float32, 3, 1, 1, 128),
        ("squat", torch.bfloat16, 2, 2, 2, 96),
        ("kivi-1", torch.float32, 1, 2, 4, 32),
    ],
)
def test_attention_is_the_references_at_any_length(scheme, dtype, batch, heads, queries, dim, present):
    """Of tokens that are fewer than sinks, that fill no page, that have pages of keys alone, and that several threads
    share."""
    plan = get(scheme).plan(LayerGeometry(0, 1, heads, dim, dtype, CPU))
    for n in (1, 3, 40, 65, 97, 1100):
        k, v = (randn(seed, batch, heads, n + 1, dim).to(dtype) for seed in (1, 2))
        q = randn(3, batch, heads * queries, n + 1, dim).to(dtype)
        states = [KVState.allocate(spec, batch, heads, dim, dtype, CPU, n) for spec in (plan.key, plan.value)]
        for state, x in zip(states, (k, v), strict=True):
            state.append(x[:, :, :n], 0, q[:, :, :n])
        assert attend_codes.serves(plan.key, plan.value, dim, dtype, queries, CPU)
        new = [x[:, :, n : n + present] for x in (k, v)]
        packs, texts = [state.pack for state in states], [state.text for state in states]
        arguments = q[:, :, n:], *packs, states[0].carrier(n), *new, None, False, dim**-0.5, 0.0, *texts
        got, expected = (torch.ops.kvpass.attend(*arguments, name)[0] for name in ("inductor", "reference"))
        error = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, expected, atol=error, rtol=error)
