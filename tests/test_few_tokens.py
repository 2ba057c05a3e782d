"""C++ kernels for a few tokens per sample, against the reference."""

import pytest
import torch
from torch._inductor import config as inductor_config

from kvpass.cache.per_cache import RotaryState
from kvpass.cache.state import KVState
from kvpass.codec.rope import rope_of, rotate
from kvpass.lowering.cpp import attend_allocated, attend_codes, few_tokens
from kvpass.schemes import LayerGeometry, get

from common import randn

CPU = torch.device("cpu")


def assert_as_the_reference(
    module, plan, shape, dtype, present, lengths, interleaved=False, tokens=1, mask_of=None, sinks=None
):
    """Compare attention of ``tokens`` tokens over caches of ``shape`` ``(batch, heads, queries, head_dim)`` at
    ``lengths`` with the reference. With page-relative RoPE, half of the channels are rotated. mask_of: makes the mask
    from its shape. sinks: logits of query heads."""
    batch, heads, queries, dim = shape
    rope = rope_of(dim // 4, interleaved) if plan.key.transform.turns else ""
    for n in lengths:
        k, v = (randn(seed, batch, heads, n + tokens, dim) for seed in (1, 2))
        q = randn(3, batch, heads * queries, n + tokens, dim).to(dtype)
        states = [KVState.allocate(spec, batch, heads, dim, dtype, CPU, n) for spec in (plan.key, plan.value)]
        key, value = states
        if rope:
            speeds = 100 ** (-torch.arange(dim // 4) / (dim // 4))
            angles = (torch.arange(n + tokens + plan.key.page_size)[:, None] * speeds).expand(batch, -1, -1)
            tables = angles.cos().to(dtype), angles.sin().to(dtype)
            k, key.rotary = rotate(k + 2, *tables, rope), RotaryState.of(plan.key, *tables)
        k, v = k.to(dtype), v.to(dtype)
        if value.spec.quantizer.follows_keys:
            value.same_layer_keys = key
        key.append(k[:, :, :n], 0, q[:, :, :n], rope=rope)
        value.append(v[:, :, :n], 0)
        assert few_tokens.kernel_of(plan.key, plan.value, dim, dtype) is module.attend
        new = [x[:, :, n : n + present * tokens] for x in (k, v)]
        packs, texts = [state.pack for state in states], [state.text for state in states]
        mask = None if mask_of is None else mask_of(batch, heads * queries, tokens, n + present * tokens)
        causal = bool(present) and mask is None
        arguments = q[:, :, n:], *packs, key.length_tensor(n), *new, mask, causal, dim**-0.5, 0.0, *texts
        more = key.tables() | dict(sinks=sinks, with_lse=True)
        got, expected = (torch.ops.kvpass.attend(*arguments, name, **more) for name in ("cpp", "reference"))
        error = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, expected, atol=error, rtol=error)


BY_CHANNEL = [
    ("kivi", torch.float32, (2, 3, 3, 64)),
    ("kivi-sinks", torch.bfloat16, (1, 2, 8, 32)),
    ("kivi-4", torch.float32, (3, 1, 1, 128)),
    ("squat", torch.bfloat16, (2, 2, 2, 96)),
    ("kivi-1", torch.float32, (1, 2, 4, 32)),
    ("kivi-3", torch.float32, (1, 2, 3, 64)),
    (dict(scheme="kivi", residual=128), torch.float32, (1, 2, 3, 64)),
    ("logquant", torch.float32, (2, 2, 3, 64)),
    (dict(scheme="kivi", bits=4, residual=64, group_size=16), torch.bfloat16, (2, 1, 2, 32)),
    ("kivi-sinks", torch.float32, (2, 1, 11, 32)),
]
BY_TOKEN = [
    ("higgs", torch.float32, (2, 3, 3, 64)),
    ("higgs-sinks", torch.bfloat16, (1, 2, 8, 64)),
    ("higgs-1.5", torch.float32, (2, 1, 2, 128)),
    ("higgs-3", torch.float32, (1, 2, 1, 32)),
    ("higgs-4", torch.bfloat16, (1, 1, 11, 64)),
    (dict(scheme="higgs", group_size=32), torch.float32, (1, 2, 2, 96)),
    ("quarot-2", torch.float32, (2, 2, 2, 128)),
    (dict(scheme="rtn", bits=3, group_size=16), torch.float32, (1, 2, 4, 48)),
    ("turboquant", torch.float32, (1, 2, 4, 32)),
]


@pytest.mark.slow_cases("squat-*", "kivi-1-*", "*residual*True", "higgs-3-*", "higgs-1.5-*", "turboquant-*")
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize(("scheme", "dtype", "shape"), [*BY_CHANNEL, *BY_TOKEN], ids=str)
def test_attention_over_codes_equals_the_reference(scheme, dtype, shape, present):
    """With fewer tokens than sinks, too few for a page, pages of keys alone, and enough tokens for several threads.

    Codes by token are those of grids of one, two and four dimensions, and uniform ones in one or two fields, rotated or
    not, with centred keys, and with one or more groups."""
    plan = get(scheme).plan(LayerGeometry(0, 1, shape[1], shape[3], dtype, CPU))
    assert_as_the_reference(attend_codes, plan, shape, dtype, present, (1, 3, 40, 65, 97, 1100))


ALIKE = dict(scheme="waterfill", rich_key_fields=(0, 0), rich_value_fields=(0, 0))


@pytest.mark.slow_cases("waterfill-3-*", "*post*")
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize(
    ("scheme", "dtype", "shape"),
    [
        ("waterfill", torch.float32, (2, 3, 3, 64)),
        ("waterfill-2", torch.bfloat16, (1, 2, 8, 32)),
        ("waterfill-heads", torch.float32, (2, 3, 3, 64)),
        ("waterfill-heads", torch.bfloat16, (1, 4, 1, 32)),
        ("waterfill-3", torch.float32, (1, 2, 1, 128)),
        ("waterfill-heads", torch.float32, (2, 1, 17, 32)),
        (dict(scheme="waterfill", rope="post", residual=64), torch.bfloat16, (2, 1, 4, 96)),
        (dict(scheme="waterfill", center=False, residual=16, sinks=0), torch.float32, (1, 2, 2, 64)),
        (ALIKE, torch.float32, (2, 1, 5, 48)),
    ],
    ids=str,
)
def test_attention_over_per_channel_widths_equals_the_reference(scheme, dtype, shape, present):
    """The same with per-channel bit widths, with and without page-relative RoPE, and with one or two ranks of
    tokens."""
    plan = get(scheme).plan(LayerGeometry(0, 1, shape[1], shape[3], dtype, CPU))
    assert_as_the_reference(
        attend_allocated, plan, shape, dtype, present, (3, 100, 165, 1100), interleaved=shape[0] > 1
    )


@pytest.mark.slow_cases("kivi-dtype0*", "waterfill-dtype3*")
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize(
    ("scheme", "dtype", "shape", "tokens"),
    [
        ("kivi", torch.float32, (2, 2, 3, 64), 5),
        ("kivi-sinks", torch.bfloat16, (1, 2, 1, 32), 16),
        ("kivi-sinks", torch.float32, (1, 1, 12, 32), 2),
        ("higgs-sinks", torch.float32, (2, 2, 3, 32), 3),
        ("logquant", torch.bfloat16, (1, 2, 2, 32), 5),
        ("waterfill", torch.float32, (2, 1, 3, 64), 5),
        ("waterfill", torch.bfloat16, (1, 2, 1, 32), 7),
        ("waterfill-heads", torch.float32, (2, 3, 2, 32), 3),
    ],
)
def test_attention_of_several_tokens_equals_the_reference(scheme, dtype, shape, tokens, present):
    """Tokens of a call see each other causally. Some of them are sinks, or none; queries fill blocks or do not."""
    plan = get(scheme).plan(LayerGeometry(0, 1, shape[1], shape[3], dtype, CPU))
    module = attend_allocated if scheme.startswith("waterfill") else attend_codes
    lengths = (3, 40, 97, 1100) if module is attend_codes else (3, 100, 165, 1100)
    assert_as_the_reference(module, plan, shape, dtype, present, lengths, tokens=tokens)


def padding(batch, heads, queries, tokens):
    """Left padding, different in each sample, and causal. The first sample is hidden up to its last token."""
    starts = torch.arange(batch, 0, -1) * (tokens - queries) // batch
    return (torch.arange(tokens) >= starts[:, None, None, None]) & torch.ones(queries, tokens).tril(
        tokens - queries
    ).bool()


def scattered(batch, heads, queries, tokens):
    """A few tokens, others for each query head, shared by all samples. The first head sees none."""
    seen = randn(9, 1, heads, queries, tokens) > 2
    seen[:, 0] = False
    return seen


def added(batch, heads, queries, tokens):
    """A bias in another dtype and not contiguous; the lowest number hides most tokens, or all of the last query."""
    bias = randn(9, batch, 1, tokens, queries).mT.double()
    bias[..., tokens // 3 :] = torch.finfo(torch.float32).min
    bias[..., -1, :] = torch.finfo(torch.float32).min
    return bias.float()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("mask", [padding, scattered, added])
@pytest.mark.parametrize("scheme", ["kivi-sinks", "higgs-sinks", "waterfill", "waterfill-heads"])
def test_masks_hide_and_weigh_tokens_as_in_the_reference(scheme, mask, tokens):
    plan = get(scheme).plan(LayerGeometry(0, 1, 2, 32, torch.float32, CPU))
    module = attend_allocated if scheme.startswith("waterfill") else attend_codes
    assert_as_the_reference(
        module, plan, (2, 2, 3, 32), torch.float32, True, (2, 170, 1100), tokens=tokens, mask_of=mask
    )


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("scheme", ["kivi-sinks", "waterfill"])
def test_sinks_join_the_softmax_as_in_the_reference(scheme, tokens):
    """With logits that outweigh all tokens, and far smaller ones, in another dtype."""
    plan = get(scheme).plan(LayerGeometry(0, 1, 2, 32, torch.float32, CPU))
    module = attend_allocated if scheme.startswith("waterfill") else attend_codes
    sinks = torch.tensor([30.0, 5, 0, 1, -2, -1e4], dtype=torch.float64)
    given = dict(tokens=tokens, sinks=sinks)
    assert_as_the_reference(module, plan, (2, 2, 3, 32), torch.float32, True, (2, 170, 1100), **given)
    assert_as_the_reference(module, plan, (2, 2, 3, 32), torch.float32, True, (170,), **given, mask_of=padding)


@pytest.mark.slow_cases("*-1", "256-*")
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("vectors", [256, 1])
def test_kernels_agree_for_every_vector_size(vectors, tokens):
    """Also for processors without masked selection of lanes."""
    kernels = attend_codes._kernel, attend_allocated._kernel
    for kernel in kernels:
        kernel.cache_clear()
    try:
        with inductor_config.patch({"cpp.simdlen": vectors}):
            for module, scheme in (
                (attend_codes, "kivi"),
                (attend_codes, "higgs"),
                (attend_codes, "higgs-3"),
                (attend_allocated, "waterfill"),
            ):
                plan = get(scheme).plan(LayerGeometry(0, 1, 2, 64, torch.bfloat16, CPU))
                assert_as_the_reference(module, plan, (1, 2, 3, 64), torch.bfloat16, True, (200,), tokens=tokens)
    finally:
        for kernel in kernels:
            kernel.cache_clear()
