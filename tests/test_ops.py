"""The ``kvpass::*`` ops: PyTorch's contracts, and every implementation against the reference and against float64."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from kvpass import KVPassError
from kvpass.cache.state import KVState
from kvpass.codec import Subspace
from kvpass.codec.affine import params_dtype
from kvpass.codec.rope import rotate
from kvpass.layout.window import length_tensor
from kvpass.lowering.table import DispatchKey, select

from common import (
    DIM,
    DTYPES,
    awkward,
    coded,
    implementations,
    naive_attention,
    only_reference,
    queries_for,
    randn,
    state_of,
)

OPS = torch.ops.kvpass
KEYS = coded(2, "channel", 8, 16)
VALUES = coded(2, "token", 8, 16, residual=16)
SINKS = coded(3, "channel", 16, 16, sinks=4, rollback=3)
LOG = coded(2, "channel", 16, 16, residual=32, keep="log")
SUBSPACE = coded(2, "channel", 8, 16, subspace=Subspace(3, 1.0, True, DIM // 2))
SPECS = {"keys": KEYS, "values": VALUES, "sinks, 3 bits": SINKS, "subspace": SUBSPACE}
EACH_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
KIVI = (coded(2, "channel", 32, 32), coded(2, "token", 16, 32, residual=32))
WITH_SINKS = (coded(4, "channel", 16, 32, sinks=4), coded(1, "token", 8, 32, residual=32, sinks=4))


def strided_as_models_make_it(x):
    """``[B, H, S, D]`` as a transposed view of ``[B, S, H, D]``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def quantize_arguments(spec, dtype=torch.float32, pages=2):
    rest = DIM - spec.quantizer.subspace.block_size if spec.quantizer.subspace else 0
    fitted = [randn(1, 2, 2, rest, rest).mul(0.1).to(params_dtype(dtype))] if rest else []
    return randn(0, 2, 2, pages * spec.page_size, DIM, dtype=dtype), fitted, str(spec)


def append_arguments(spec, n, new, dtype=torch.float32):
    x = randn(0, 2, 2, n + new, DIM, dtype=dtype)
    state = KVState.allocate(spec, 2, 2, DIM, dtype, "cpu", n + new)
    q = queries_for(spec, 1, 2, 2)
    if n:
        with only_reference():
            state.append(x[:, :, :n], 0, q)
    tap = None if q is None or n else q.to(dtype)
    return (state.pack, state.length_tensor(n), x[:, :, n:], tap, None, state.text), state


def attend_arguments(
    specs,
    n,
    queries=1,
    mask=None,
    causal=False,
    softcap=0.0,
    dtype=torch.float32,
    batch=2,
    repeats=2,
    heads=2,
    scale=0.3,
):
    """Arguments of attend, and the dense keys and values (dequantized past, then present)."""
    x = [randn(i, 2, heads, n + queries, DIM, dtype=dtype) for i in range(2)]
    states = [state_of(s, t[:, :, :n], room=n) for s, t in zip(specs, x, strict=True)]
    new = [t[:, :, n:] for t in x]
    q = randn(7, 2, heads * repeats, queries, DIM, dtype=dtype)
    with only_reference():
        dense = [torch.cat([s.dequantize(n), t], 2) for s, t in zip(states, new, strict=True)]
    arguments = (
        q, *(s.pack for s in states), states[0].length_tensor(n), *new, mask, causal, scale, softcap,
        *(s.text for s in states),
    )  # fmt: skip
    return arguments, dense


def masks(kind: str, batch: int, queries: int, tokens: int, heads: int = 1):
    """Random masks in which every query sees at least one key."""
    if kind == "none":
        return None
    allowed = torch.rand(batch, heads, queries, tokens, generator=torch.Generator().manual_seed(3)) > 0.4
    allowed[..., -1] = True
    if kind == "bool":
        return allowed
    if kind == "float":
        return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return randn(5, batch, heads, queries, tokens)  # "bias"


# ---------------------------------------------------------------- contracts with PyTorch


@pytest.mark.usefixtures("reference_in_this_test")
@EACH_SPEC
def test_opcheck_quantize(spec):
    torch.library.opcheck(OPS.quantize.default, quantize_arguments(spec))


@pytest.mark.usefixtures("reference_in_this_test")
@EACH_SPEC
@pytest.mark.parametrize("n, new", [(0, 40), (40, 1), (63, 20)])
def test_opcheck_append(spec, n, new):
    torch.library.opcheck(OPS.append_.default, append_arguments(spec, n, new)[0])


@pytest.mark.usefixtures("reference_in_this_test")
@EACH_SPEC
@pytest.mark.parametrize("n", [3, 70])
def test_opcheck_dequantize(spec, n):
    state = state_of(spec, randn(0, 2, 2, n, DIM), q=queries_for(spec, 1, 2, 2))
    torch.library.opcheck(OPS.dequantize.default, (state.pack, state.length_tensor(n), state.text))


@pytest.mark.usefixtures("reference_in_this_test")
@pytest.mark.parametrize(
    "case",
    [
        dict(n=70),
        dict(n=70, mask="bool"),
        dict(n=33, queries=3, causal=True),
        dict(n=33, queries=3, mask="float", softcap=5.0),
    ],
    ids=str,
)
def test_opcheck_attend(case):
    case = dict(
        case, mask=masks(case.get("mask", "none"), 2, case.get("queries", 1), case["n"] + case.get("queries", 1))
    )
    torch.library.opcheck(
        OPS.attend.default, attend_arguments((SINKS, coded(2, "token", 8, 16, 16, sinks=4)), **case)[0]
    )


def assert_fake_tells_the_truth(op, arguments, name):
    """Assert that an op has the same output shape, dtype and strides, all contiguous, on real and on fake tensors."""
    real = op(*arguments, name)
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        fake = op(*fakes, name)
    real, fake = ((out if isinstance(out, (tuple, list)) else (out,)) for out in (real, fake))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert a.is_contiguous()


@pytest.mark.parametrize("name", implementations("quantize"))
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    "spec, dtype",
    [(KIVI[0], torch.float32), (SINKS, torch.bfloat16), (SUBSPACE, torch.float32)],
    ids=["kivi keys", "3 bits, bfloat16", "subspace"],
)
def test_quantize_matches_its_fake_also_for_strided_input(name, strided, spec, dtype):
    x, *rest = quantize_arguments(spec, dtype)
    assert_fake_tells_the_truth(OPS.quantize, (strided_as_models_make_it(x) if strided else x, *rest), name)


@pytest.mark.parametrize("name", implementations("dequantize"))
@pytest.mark.parametrize("n", [0, 1, 3, 20, 70])
def test_dequantize_matches_its_fake(name, n):
    state = state_of(SINKS, randn(0, 2, 2, n, DIM), room=n)
    assert_fake_tells_the_truth(OPS.dequantize, (state.pack, state.length_tensor(n), state.text), name)


@pytest.mark.usefixtures("reference_in_this_test")
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("n", [0, 70])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_attend_matches_its_fake_also_for_strided_queries(queries, softcap, n, dtype):
    arguments, _ = attend_arguments((KEYS, VALUES), n, queries, softcap=softcap, dtype=dtype)
    assert_fake_tells_the_truth(OPS.attend, arguments, "auto")
    assert_fake_tells_the_truth(OPS.attend, (strided_as_models_make_it(arguments[0]), *arguments[1:]), "auto")


# ---------------------------------------------------------------- attention against float64

LENGTHS = (0, 1, 31, 32, 33, 64, 100)


@pytest.mark.slow_cases("sinks, b*inductor")
@pytest.mark.nightly_cases("sinks, bool*inductor", "sinks, f*inductor")
@pytest.mark.parametrize("name", implementations("attend"))
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(
    "specs, kind",
    [(KIVI, "none"), (WITH_SINKS, "bool"), (WITH_SINKS, "float"), (WITH_SINKS, "bias")],
    ids=["kivi", "sinks, bool mask", "sinks, float mask", "sinks, bias"],
)
def test_one_query_attends_to_everything_the_mask_allows(name, n, specs, kind):
    arguments, dense = attend_arguments(specs, n, mask=masks(kind, 2, 1, n + 1))
    expected = naive_attention(arguments[0], *dense, mask=arguments[6], scale=0.3)
    (got,) = OPS.attend(*arguments, name)
    assert got.dtype == torch.float32 and got.is_contiguous()
    assert torch.allclose(got.double(), expected, atol=2e-5)


@pytest.mark.slow_cases("*inductor")
@pytest.mark.parametrize("name", implementations("attend"))
@pytest.mark.parametrize("n", [0, 33, 100])
def test_one_query_with_softcap(name, n):
    arguments, dense = attend_arguments(KIVI, n, softcap=2.0, scale=1.0)
    expected = naive_attention(arguments[0], *dense, scale=1.0, softcap=2.0)
    assert torch.allclose(OPS.attend(*arguments, name)[0].double(), expected, atol=2e-5)
    if not n:
        return  # over one key nothing depends on the scores
    uncapped = naive_attention(arguments[0], *dense, scale=1.0)
    assert not torch.allclose(expected, uncapped, atol=1e-3)


@pytest.mark.slow_cases("*inductor")
@pytest.mark.parametrize("name", implementations("attend"))
@pytest.mark.parametrize("n", [0, 33, 70])
def test_logits_without_values_take_part_in_the_softmax(name, n):
    arguments, dense = attend_arguments(KIVI, n)
    sinks = randn(3, arguments[0].shape[1])
    expected = naive_attention(arguments[0], *dense, scale=0.3, sinks=sinks)
    (got,) = OPS.attend(*arguments, name, sinks=sinks)
    assert torch.allclose(got.double(), expected, atol=2e-5)
    assert not torch.allclose(OPS.attend(*arguments, name)[0].double(), expected, atol=1e-3)


@pytest.mark.parametrize("queries, softcap, causal", [(1, 0.0, False), (3, 2.0, True), (3, 0.0, False)])
@pytest.mark.parametrize("rope", ["", "half-8"])
def test_attention_over_a_dequantized_past_equals_plain_attention(queries, softcap, causal, rope):
    q, k, v = randn(0, 2, 4, queries, DIM), randn(1, 2, 2, 40 + queries, DIM), randn(2, 2, 2, 40 + queries, DIM)
    angle, sinks = randn(4, 2, 60, DIM // 2), randn(5, 4)
    tables = dict(cos=angle.cos(), sin=angle.sin(), rope=rope) if rope else {}
    past = rotate(k[:, :, :40], angle.cos(), angle.sin(), rope) if rope else k[:, :, :40]
    expected = naive_attention(
        q, torch.cat([past, k[:, :, 40:]], 2), v, causal=causal, scale=0.3, softcap=softcap, sinks=sinks
    )  # fmt: skip
    decoded = ([x[:, :, :40].contiguous()] for x in (k, v))
    arguments = (
        q,
        *decoded,
        length_tensor(40),
        k[:, :, 40:],
        v[:, :, 40:],
        None,
        causal,
        0.3,
        softcap,
        str(KEYS),
        str(VALUES),
    )
    (got,) = OPS.attend(*arguments, sinks=sinks, **tables)
    assert torch.allclose(got.double(), expected, atol=2e-5)
    assert_fake_tells_the_truth(OPS.attend, arguments, "auto")


def test_keys_that_are_stored_rotated_are_not_rotated_again():
    angle = randn(4, 2, 120, DIM // 2)
    with pytest.raises(KVPassError, match="stored after rotary embedding"):
        OPS.attend(*attend_arguments(KIVI, 70)[0], cos=angle.cos(), sin=angle.sin(), rope="half-8")


@pytest.mark.nightly_cases("inductor")
@pytest.mark.parametrize("name", implementations("attend"))
def test_masks_may_differ_from_head_to_head_and_be_shared_by_the_batch(name):
    for batch, heads in ((2, 4), (1, 1)):  # a kernel each
        mask = masks("bool", batch, 1, 71, heads)
        arguments, dense = attend_arguments(WITH_SINKS, 70, mask=mask)
        expected = naive_attention(arguments[0], *dense, mask=mask, scale=0.3)
        assert torch.allclose(OPS.attend(*arguments, name)[0].double(), expected, atol=2e-5), (batch, heads)


@pytest.mark.parametrize("name", implementations("attend"))
def test_spare_capacity_is_never_attended_to(name):
    arguments, dense = attend_arguments(KIVI, 70)
    for state in arguments[1:3]:
        for i, pool in enumerate(state[:3]):
            state[i] = torch.full((*pool.shape[:2], 9, *pool.shape[3:]), 77, dtype=pool.dtype)
            state[i][:, :, :2] = pool[:, :, :2]
    (got,) = OPS.attend(*arguments, name)
    assert torch.allclose(got.double(), naive_attention(arguments[0], *dense, scale=0.3), atol=2e-5)


@pytest.mark.usefixtures("reference_in_this_test")
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("queries", [2, 5])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_several_queries_with_past(n, queries, softcap, kind):
    causal = kind == "causal"
    mask = None if causal else masks(kind, 2, queries, n + queries)
    arguments, dense = attend_arguments(WITH_SINKS, n, queries, mask, causal, softcap)
    expected = naive_attention(arguments[0], *dense, mask, causal, 0.3, softcap)
    assert torch.allclose(OPS.attend(*arguments)[0].double(), expected, atol=2e-5)


@pytest.mark.usefixtures("reference_in_this_test")
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("queries", [1, 3])
def test_query_heads_share_kv_heads_in_order(repeats, queries):
    arguments, dense = attend_arguments(KIVI, 50, queries, repeats=repeats, heads=3)
    expected = naive_attention(arguments[0], *dense, scale=0.3)
    assert torch.allclose(OPS.attend(*arguments)[0].double(), expected, atol=2e-5)


@pytest.mark.usefixtures("reference_in_this_test")
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_attention_in_16_bits_answers_in_16_bits(dtype, tolerance, queries, softcap):
    arguments, dense = attend_arguments(KIVI, 60, queries, softcap=softcap, dtype=dtype)
    (got,) = OPS.attend(*arguments)
    assert got.dtype == dtype
    assert torch.allclose(
        got.double(), naive_attention(arguments[0], *dense, scale=0.3, softcap=softcap), atol=tolerance
    )


@pytest.mark.usefixtures("reference_in_this_test")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_fully_masked_padding_query_gives_no_nan(softcap, queries):
    mask = torch.ones(2, 1, queries, 20 + queries, dtype=torch.bool)
    mask[1, :, 0] = False
    arguments, _ = attend_arguments(KIVI, 20, queries, mask, softcap=softcap)
    assert torch.isfinite(OPS.attend(*arguments)[0]).all()


@pytest.mark.slow
def test_attend_does_not_write_to_the_state():
    arguments, _ = attend_arguments(KIVI, 70)
    tensors = [*arguments[1], *arguments[2]]
    before = [tensor.clone() for tensor in tensors]
    for name in implementations("attend"):
        OPS.attend(*arguments, name)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


# ---------------------------------------------------------------- implementations against the reference

CODECS = {"kivi keys": KIVI[0], "kivi values": KIVI[1], "sinks, 3 bits": SINKS, "subspace": SUBSPACE}
EACH_CODEC = pytest.mark.parametrize("spec", CODECS.values(), ids=CODECS)


@pytest.mark.parametrize("name", implementations("quantize"))
@EACH_CODEC
@pytest.mark.parametrize("kind", ["normal", "outliers", "mixed magnitudes", "two values"])
def test_quantize_equals_the_reference_bit_for_bit(name, spec, kind):
    _, compensation, text = quantize_arguments(spec)
    for pages in (1, 2, 5):
        x = awkward(pages, kind, 2, 2, pages * spec.page_size, DIM, limit=100)
        expected = OPS.quantize(x, compensation, text, "reference")
        for got, wanted in zip(OPS.quantize(x, compensation, text, name), expected, strict=True):
            assert got.shape == wanted.shape and torch.equal(got, wanted)


@pytest.mark.parametrize("name", implementations("dequantize"))
@pytest.mark.parametrize("spec", [*KIVI, SINKS], ids=["kivi keys", "kivi values", "sinks, 3 bits"])
def test_dequantize_equals_the_reference_bit_for_bit(name, spec):
    for n in LENGTHS:
        state = state_of(spec, randn(n, 2, 2, n, DIM), q=queries_for(spec, 1, 2, 2), room=200)
        arguments = (state.pack, state.length_tensor(n), state.text)
        assert torch.equal(OPS.dequantize(*arguments, name), OPS.dequantize(*arguments, "reference"))


@pytest.mark.parametrize("name", implementations("append_"))
@EACH_CODEC
@pytest.mark.parametrize("n, new", [(0, 1), (0, 100), (31, 1), (63, 1), (33, 64), (50, 5)])
def test_append_equals_the_reference_bit_for_bit(name, spec, n, new):
    (arguments, got), (wanted_arguments, wanted) = (append_arguments(spec, n, new) for _ in range(2))
    OPS.append_(*arguments, name)
    OPS.append_(*wanted_arguments, "reference")
    for (field, a), (_, b) in zip(got.tensors(), wanted.tensors(), strict=True):
        assert torch.equal(a, b), field


@pytest.mark.parametrize("name", implementations("append_layers_"))
@pytest.mark.parametrize("spec", [*KIVI, SINKS, LOG], ids=["kivi keys", "kivi values", "sinks, 3 bits", "log-sparse"])
@pytest.mark.parametrize("n, new", [(0, 100), (63, 1), (40, 1), (50, 5)])
def test_layers_are_appended_to_together_as_each_would_be_alone(name, spec, n, new):
    got, wanted = ([state_of(spec, randn(i, 2, 2, n, DIM), room=n + new) for i in range(3)] for _ in range(2))
    xs = [randn(10 + i, 2, new, 2, DIM).transpose(1, 2) for i in range(3)]
    OPS.append_layers_([tensor for state in got for tensor in state.pack], length_tensor(n), xs, str(spec), name)
    for state, alone, x in zip(got, wanted, xs, strict=True):
        alone.append(x, n)
        for (field, a), (_, b) in zip(state.tensors(), alone.tensors(), strict=True):
            assert torch.equal(a, b), field


@pytest.mark.usefixtures("reference_in_this_test")
def test_opcheck_append_layers():
    states = [state_of(KEYS, randn(i, 1, 2, 40, DIM), room=60) for i in range(2)]
    tensors = [tensor for state in states for tensor in state.pack]
    torch.library.opcheck(
        OPS.append_layers_.default, (tensors, length_tensor(40), list(randn(3, 2, 1, 2, 20, DIM)), str(KEYS))
    )


@pytest.mark.parametrize("name", implementations("quantize"))
def test_every_implementation_refuses_nan(name):
    x = randn(0, 2, 2, 32, DIM)
    x[0, 1, 5, 2] = float("nan")
    with pytest.raises(KVPassError, match="NaN"):
        OPS.quantize(x, [], str(KEYS), name)


# ---------------------------------------------------------------- the choice of a lowering


def test_the_log_names_the_lowering_and_the_reason(caplog):
    select.cache_clear()
    with caplog.at_level("INFO", logger="kvpass.lowering"):
        OPS.attend(*attend_arguments(KIVI, 70, queries=3, causal=True)[0])
        select(DispatchKey("attend", "cpu", tuple(map(str, KIVI)), queries=1, head_dim=DIM))
        select(DispatchKey("attend", "cpu", (str(coded(32, "token", 16, 16)),) * 2, queries=1, head_dim=DIM))
        of_one = DispatchKey("attend", "cpu", tuple(map(str, KIVI)), 1, DIM, torch.float32)
        assert select(of_one).name == "cpp" and select(replace(of_one, extras=("mask", "softcap"))).name == "inductor"
    several, one, raw, kernel, masked = (
        record.message for record in caplog.records if "kvpass::attend on" in record.message
    )
    assert "3 queries: cpp" in several and "1 query: inductor" in one
    assert "1 query: cpp" in kernel and "not cpp: it does not support softcap." in masked
    assert "1 query: reference (" in raw and "not inductor: it does not support bits=32." in raw


@pytest.mark.parametrize("op", ["quantize", "append_", "dequantize", "attend"])
def test_the_lowering_argument_of_an_op_is_checked(op):
    arguments = {
        "quantize": lambda: quantize_arguments(KEYS),
        "append_": lambda: append_arguments(KEYS, 0, 5)[0],
        "dequantize": lambda: (append_arguments(KEYS, 5, 0)[0][0], length_tensor(5), str(KEYS)),
        "attend": lambda: attend_arguments((KEYS, VALUES), 5)[0],
    }[op]()
    with pytest.raises(KVPassError, match=f"no lowering 'nope' for kvpass::{op}"):
        getattr(OPS, op)(*arguments, "nope")
