"""What errors in a latent cost, from the keys and values that a model expands it to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.codec.expansion import queries_of_latent

from common import randn, seeds

RANK, ROTARY, NOPE, VALUE = 12, 4, 6, 5


def attention(seed, batch, heads, tokens, scale=1.0):
    """A latent and a rotary part, queries, keys and values of ``heads`` heads, and the expansion of each head."""
    latent, rotary = randn(seed, batch, 1, tokens, RANK), randn(seed + 1, batch, 1, tokens, ROTARY)
    to_keys, to_values = randn(seed + 2, heads, NOPE, RANK), randn(seed + 3, heads, VALUE, RANK)
    keys = torch.einsum("bgtr,hdr->bhtd", latent, to_keys)
    keys = torch.cat([keys, rotary.expand(-1, heads, -1, -1)], -1)
    values = torch.einsum("bgtr,hdr->bhtd", latent, to_values)
    query = scale * randn(seed + 4, batch, heads, tokens, NOPE + ROTARY)
    return latent, rotary, query, keys, values, to_keys, to_values


@given(seeds, st.integers(1, 2), st.integers(1, 3), st.integers(40, 80), st.sampled_from([None, 0.3]))
def test_their_second_moment_is_the_cost_by_the_true_expansion(seed, batch, heads, tokens, scale):
    *given_, to_keys, to_values = attention(seed, batch, heads, tokens)
    found = queries_of_latent(*given_, scale)
    assert found.shape == (batch, 1, RANK, RANK)
    _, _, query, _, values = given_
    scale = (NOPE + ROTARY) ** -0.5 if scale is None else scale
    for row in range(batch):
        cost = torch.zeros(RANK, RANK)
        for head in range(heads):
            far = (values[row, head] - values[row, head].mean(0)).square().sum(-1).mean()
            seen = query[row, head, :, :NOPE] @ to_keys[head] * scale
            cost += far * seen.T @ seen / tokens + to_values[head].T @ to_values[head]
        torch.testing.assert_close(found[row, 0].T @ found[row, 0], cost, rtol=1e-3, atol=1e-3 * cost.max())


def test_too_few_tokens_say_nothing():
    *given_, _, _ = attention(0, 1, 2, 2 * (RANK + ROTARY) - 1)
    assert queries_of_latent(*given_) is None
    *given_, _, _ = attention(0, 2, 2, RANK + ROTARY)  # rows count together
    assert queries_of_latent(*given_) is not None


@pytest.mark.parametrize("which", ["keys", "values"])
def test_what_is_not_linear_in_the_latent_is_left_alone(which):
    latent, rotary, query, keys, values, _, _ = attention(0, 1, 2, 60)
    keys, values = (x.square() if name == which else x for name, x in (("keys", keys), ("values", values)))
    assert queries_of_latent(latent, rotary, query, keys, values) is None
