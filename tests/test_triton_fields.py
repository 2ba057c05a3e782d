"""Triton attention over pages with per-channel bit widths (run as in `test_triton`): against the reference, and in 16
bits against float32, of which both results are roundings."""

from dataclasses import replace

import pytest
import torch

import kvpass
from kvpass import KVPassError
from kvpass.cache.per_cache import RotaryState
from kvpass.cache.state import KVState
from kvpass.layout.window import LENGTH_OFFSET
from kvpass.lowering import tiles
from kvpass.lowering.table import DispatchKey, select
from kvpass.schemes import LayerGeometry, WaterfillConfig

from common import changed_table, coded, generator, randn, recoded
from test_allocation import mixed, positions
from tiny import called, llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", minversion="3.7" if DEVICE == "cpu" else None)  # as in `test_triton`

from kvpass.lowering.triton.allocated import layout_of  # noqa: E402

OPS = torch.ops.kvpass
ALIKE = dict(rich_key_fields=(0, 0), rich_value_fields=(0, 0))


def plan(dim, heads=1, dtype=torch.float32, rope="pre", **fields):
    geometry = LayerGeometry(0, 1, heads, dim, dtype, torch.device(DEVICE))
    return WaterfillConfig(**{"rope": rope, **fields}).plan(geometry)


def past_of(plan, n, heads, dim, batch, dtype, rope):
    """Key and value states with ``n`` tokens, and the rotary tables of the keys."""
    key, value = (KVState.allocate(s, batch, heads, dim, dtype, "cpu", n + 70) for s in (plan.key, plan.value))
    tables = {}
    if plan.key.transform.page_rope:
        cos, sin = (table.to(dtype) for table in positions(rope, n + 70, *range(0, 7 * batch, 7), scale=1.2))
        key.rotary, tables = RotaryState.of(plan.key, cos, sin), dict(rope=rope)
    value.same_layer_keys = key
    q = randn(0, batch, 2 * heads, n, dim, dtype=dtype)
    key.append(mixed(0, batch, heads, n, dim, dtype=dtype), 0, q, **tables)
    value.append(mixed(3, batch, heads, n, dim, dtype=dtype) / 8, 0)
    page_tables = dict(cos=key.rotary.cos.to(DEVICE), sin=key.rotary.sin.to(DEVICE), rope=rope) if tables else {}
    return key, value, page_tables


def call(
    dim=64, heads=2, repeats=2, batch=1, n=150, queries=1, rope="pre", turns="half-32", dtype=torch.float32, mask="",
    softcap=0.0, sinks=False, **fields,
):  # fmt: skip
    """Arguments and keyword arguments of `kvpass::attend`."""
    specs = plan(dim, heads, dtype, rope, **fields)
    key, value, others = past_of(specs, n, heads, dim, batch, dtype, turns)
    new, total = [randn(5 + i, batch, heads, queries, dim, dtype=dtype) for i in range(2)], n + queries
    q, bias = randn(8, batch, heads * repeats, queries, dim, dtype=dtype) / 4, None
    if mask:
        seen = torch.rand(batch, 1, queries, total, generator=generator(7)) > 0.3
        seen[..., -1] = True
        bias = seen if mask == "bool" else randn(9, batch, heads * repeats, queries, total).masked_fill(~seen, -1e38)
    if sinks:
        others["sinks"] = randn(4, heads * repeats).to(DEVICE)
    packs = [[tensor.to(DEVICE) for tensor in state.pack] for state in (key, value)]
    given = [
        q,
        *packs,
        key.length_tensor(n),
        *new,
        bias,
        not mask and queries > 1,
        dim**-0.5,
        softcap,
        key.text,
        value.text,
    ]
    return [one.to(DEVICE) if isinstance(one, torch.Tensor) else one for one in given], others


def widened(one):
    if isinstance(one, list):
        return [widened(each) for each in one]
    return one.float() if isinstance(one, torch.Tensor) and one.is_floating_point() else one


def assert_is_a_rounding_of_the_reference(given, others):
    others = others | dict(with_lse=True)
    (got, lse), (rounded, exact_lse) = (OPS.attend(*given, name, **others) for name in ("triton", "reference"))
    assert got.dtype == rounded.dtype and got.shape == rounded.shape and got.is_contiguous()
    if got.dtype == torch.float32:
        torch.testing.assert_close((got, lse), (rounded, exact_lse), atol=1e-4, rtol=1e-4)
        return
    wide = {name: widened(one) for name, one in others.items()}
    exact, _ = OPS.attend(*map(widened, given), "reference", **wide)
    error, allowed = ((x.float() - exact).square().mean().sqrt() for x in (got, rounded))
    assert error <= 2 * allowed + 1e-4 * exact.square().mean().sqrt(), (error, allowed)


SMALL = dict(dim=32, turns="half-16", residual=16)
CALLS = {
    "as it ships": dict(batch=2),
    "wide heads": dict(dim=128, turns="half-64", heads=1, repeats=4),
    "2 bits": dict(fields="waterfill_2"),
    "3 bits": dict(heads=1, fields="waterfill_3"),
    "one head each, small blocks": dict(repeats=1, block_size=16, n=131),
    "3 heads, alike": dict(repeats=3, residual=16, **ALIKE),
    "after RoPE": dict(rope="post", n=140, batch=2),
    "after RoPE, alike, not centred": dict(rope="post", center=False, repeats=1, **ALIKE),
    "not centred": dict(center=False),
    "bits by head": dict(heads=3, batch=2, by_head=True),
    "bits by head, after RoPE, several queries": dict(**SMALL, rope="post", queries=3, by_head=True),
    "mask": dict(**SMALL, mask="bool", batch=2),
    "bias, softcap": dict(**SMALL, mask="float", softcap=3.0, batch=2),
    "sinks": dict(**SMALL, sinks=True),
    "some channels turned, beside each other": dict(**SMALL | dict(turns="interleaved-5"), mask="bool"),
    "some channels turned": dict(**SMALL | dict(turns="half-8"), queries=3),
    "pairs of bits only": dict(
        **SMALL, key_fields=(12, 0), value_fields=(9, 0), rich_key_fields=(17, 0), rich_value_fields=(15, 0)
    ),
    "five queries": dict(queries=5),
    "sixteen queries": dict(dim=32, turns="half-16", queries=16, repeats=3, mask="bool"),
    "long pages": dict(dim=32, turns="half-16", residual=64, n=220),
    "16 rows": dict(dim=32, turns="half-16", repeats=16, heads=1, n=200),
    "bfloat16": dict(dtype=torch.bfloat16, batch=2),
    "float16": dict(dtype=torch.float16, mask="bool"),
    "float16, bytes one by one": dict(**SMALL, dtype=torch.float16),
    "float16, three queries": dict(dtype=torch.float16, queries=3),
}
FIELDS = {
    "waterfill_2": dict(key_fields=(12, 4), value_fields=(8, 4), rich_key_fields=(20, 4), rich_value_fields=(16, 4)),
    "waterfill_3": dict(key_fields=(21, 4), value_fields=(15, 4), rich_key_fields=(29, 4), rich_value_fields=(23, 4)),
}


@pytest.mark.parametrize("case", ["after RoPE", "bits by head, after RoPE, several queries"])
def test_cross_attention_has_no_new_tokens(case):
    given, others = call(**CALLS[case])
    given[4:6], given[7] = (x[:, :, :0] for x in given[4:6]), False
    assert_is_a_rounding_of_the_reference(given, others)


@pytest.mark.slow_cases(
    "sixteen queries", "bias, softcap", "float16, three queries", "not centred", "some channels turned"
)
@pytest.mark.parametrize("name", CALLS)
def test_attention_over_fields_equals_the_reference(name):
    case = dict(CALLS[name])
    assert_is_a_rounding_of_the_reference(*call(**case | FIELDS.get(case.pop("fields", ""), {})))


def assert_dequantized_as_the_reference(given, others):
    tables = {name: others[name] for name in ("cos", "sin", "rope") if name in others}
    for pack, text, own in ((given[1], given[10], tables), (given[2], given[11], {})):
        got, expected = (OPS.dequantize(pack, given[3], text, name, **own) for name in ("triton", "reference"))
        assert got.dtype == expected.dtype
        error = 1e-5 if got.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, expected, atol=error * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize(
    "name", ["as it ships", "3 bits", "one head each, small blocks", "after RoPE, alike", "by head", "float16"]
)
def test_pages_are_dequantized_as_by_the_reference(name):
    cases = {
        "one head each, small blocks": dict(CALLS["one head each, small blocks"], n=200),
        "after RoPE, alike": dict(dim=128, heads=1, rope="post", n=330, center=False, residual=64, **ALIKE),
        "by head": dict(CALLS["bits by head"], dim=48, turns="half-16", n=230),
    }
    case = dict(cases.get(name) or CALLS[name])
    assert_dequantized_as_the_reference(*call(**case | FIELDS.get(case.pop("fields", ""), {})))


@pytest.mark.parametrize(
    "case", [dict(batch=2), dict(mask="float", softcap=3.0), dict(by_head=True, sinks=True)], ids=str
)
def test_prompts_read_tiles_of_pages(case, monkeypatch):
    """A tile has one page of each head; more queries than a draft has."""
    monkeypatch.setattr(tiles, "_VALUES", 1)
    given, others = call(**SMALL, queries=20, n=200, **case)
    assert select(DispatchKey("attend", DEVICE, (given[10], given[11]), 0, 32), "triton").name == "triton-tiles"
    assert_is_a_rounding_of_the_reference(given, others)


@pytest.mark.parametrize("n", [0, 3, 35, 36, 37, 68, 99, 100, 101, 132])
def test_attention_is_right_at_every_window_state(n):
    """Empty caches, sinks alone, packed keys with exact values, and whole and partial turns of the ring."""
    given, others = call(dim=32, turns="half-16", heads=1, n=max(n, 40))
    given[3] = torch.full((1,), n, device=DEVICE).expand(n + LENGTH_OFFSET)
    assert_is_a_rounding_of_the_reference(given, others)


def test_the_length_is_read_on_the_device():
    given, others = call(dim=32, turns="half-16", n=170)
    (expected,) = OPS.attend(*given, "triton", **others)
    given[3] = torch.full((1,), 170, device=DEVICE).expand(120 + LENGTH_OFFSET)  # as in a graph captured earlier
    (got,) = OPS.attend(*given, "triton", **others)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_fully_masked_query_gets_zeros():
    given, others = call(**SMALL, mask="bool", queries=2)
    given[6][:, :, 0] = False
    assert_is_a_rounding_of_the_reference(given, others)
    assert (OPS.attend(*given, "triton", **others)[0][:, :, 0] == 0).all()


def test_spare_pages_are_not_read_nor_the_state_written():
    given, others = call(**SMALL)
    (expected,) = OPS.attend(*given, "triton", **others)
    kept = [[tensor.clone() for tensor in pack] for pack in given[1:3]]
    for pack, spec in zip(given[1:3], (plan(32, residual=16).key, plan(32, residual=16).value), strict=True):
        pack[0][:, :, spec.retention.pages(150) :] = 255
    (got,) = OPS.attend(*given, "triton", **others)
    assert torch.equal(got, expected)
    for pack, before in zip(given[1:3], kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pack[1:], before[1:], strict=True))


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("fields", [{}, ALIKE, FIELDS["waterfill_3"]], ids=["ranked", "alike", "3 bits"])
def test_pieces_hold_every_field_once_and_end_where_pages_do(dim, fields):
    for spec in (plan(dim, **fields).key, plan(dim, **fields).value):
        layout, allocation = layout_of(spec, dim), spec.codec
        for pieces, counts in zip(layout.pieces, allocation.counts(dim), strict=True):
            for bits, count in zip((2, 1), counts, strict=True):
                mine = [piece for piece in pieces if piece.bits == bits]
                columns = [piece.first + i for piece in mine for i in range(piece.real)]
                assert columns == list(range(count)) and all(piece.row == count for piece in mine)
        widths = [piece for pieces in layout.pieces for piece in pieces]
        assert [piece.at for piece in widths] == [sum(p.width for p in widths[:i]) for i in range(len(widths))]
        assert layout.size == KVState.allocate(spec, 1, 1, dim, torch.float32, "cpu", 99).codes.shape[-1]


UNIFORM = coded(2, "token", 32, 32, sinks=4), coded(2, "token", 32, 32, sinks=4, residual=96)


@pytest.mark.parametrize(
    "specs, reason",
    [
        ((plan(64).key, UNIFORM[1]), "keys and values must both"),
        ((UNIFORM[0], plan(64).value), "keys and values must both"),
        ((plan(64).key, plan(64, **ALIKE).value), "same per-token bit widths as their keys"),
        ((recoded(plan(64).key, page_rope=False, pre_rope=True), plan(64).value), "queries cannot be projected"),
        ((coded(2, "token", 32, 32, page_rope=True, sinks=4), UNIFORM[1]), "one bit width for all channels"),
    ],
    ids=["keys alone", "values alone", "ranks", "no frame", "frame"],
)
def test_unsupported_calls_are_refused_with_the_reason(specs, reason):
    with pytest.raises(KVPassError, match=reason):
        select(DispatchKey("attend", DEVICE, tuple(map(str, specs)), 1, 64), "triton")


def test_auto_takes_the_kernels_on_cuda():
    specs = str(plan(128).key), str(plan(128).value)
    for queries in (1, 16):
        assert select(DispatchKey("attend", "cuda", specs, queries, 128), "auto").name == "triton" or DEVICE == "cpu"


@pytest.mark.slow
@torch.no_grad()
def test_a_whole_model_decodes_with_the_kernels_as_it_does_eagerly():
    calls = [(80, 0), *[(1, 0)] * 4, (4, 1), (3, 0)]

    def taken_by_auto(table):
        table["attend"]["triton"] = replace(table["attend"]["triton"], by_name_only=False)

    eager, packed = (kvpass.apply(llama(layers=1).to(DEVICE), "waterfill", lowering=name) for name in ("eager", "auto"))
    with changed_table(taken_by_auto):
        got, _ = called(packed, calls)
    for a, b in zip(got, called(eager, calls)[0], strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    report = kvpass.explain(packed)
    assert report.fused == 1 and "attend: triton" in str(report)  # the graph of the prompt reads no pages
