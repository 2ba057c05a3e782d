"""`PackedKV`: a packed tensor behind the interface of a float tensor."""

import pytest
import torch
import torch.nn.functional as F

import kvpass.codec
from kvpass import KVPassError, NonFiniteError, PackedKV
from kvpass.codec import Subspace
from kvpass.codec.affine import params_dtype

from common import (
    DIM,
    DTYPES,
    assert_same_contents,
    coded,
    queries_for,
    randn,
    state_of,
)

pytestmark = pytest.mark.usefixtures("reference_lowering")

KEYS = coded(2, "channel", 8, 16, sinks=2)
VALUES = coded(4, "token", 8, 16, residual=16)
SUBSPACE = coded(2, "channel", 8, 16, subspace=Subspace(3, 1.0, True, DIM // 2))
ANY = pytest.mark.parametrize("spec", [KEYS, VALUES, SUBSPACE], ids=["keys", "values", "subspace"])


def pack(spec, tokens=53, dtype=torch.float32, seed=0):
    x = randn(seed, 2, 2, tokens, DIM, dtype=dtype)
    return x, PackedKV.from_float(x, spec, queries_for(spec, seed, 2, 2))


@ANY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_looks_like_the_float_tensor_it_stands_for(spec, dtype):
    x, packed = pack(spec, dtype=dtype)
    assert packed.shape == x.shape and packed.dtype == dtype and packed.device == x.device and packed.ndim == 4
    assert type(packed) is PackedKV and "bits" in repr(packed)
    dense = packed.dequantize()
    assert type(dense) is torch.Tensor and dense.shape == x.shape and dense.dtype == dtype
    assert torch.equal(dense, state_of(spec, x, q=queries_for(spec, 0, 2, 2)).dequantize(53))


READS = {
    "add": lambda t: t + 0,
    "radd": lambda t: 1 + t,
    "matmul": lambda t: t @ t.mT,
    "slice": lambda t: t[:, 1:, 3:20, ::2],
    "index": lambda t: t[0, 1, 5],
    "fancy index": lambda t: t[:, :, torch.tensor([3, 1])],
    "cat": lambda t: torch.cat([t, torch.ones(2, 2, 1, DIM)], 2),
    "cat with itself": lambda t: torch.cat([t, t], 2),
    "sdpa": lambda t: F.scaled_dot_product_attention(torch.ones(2, 2, 1, DIM), t, t),
    "sdpa gqa": lambda t: F.scaled_dot_product_attention(torch.ones(2, 4, 3, DIM), t, t, enable_gqa=True),
    "transpose": lambda t: t.transpose(1, 2),
    "reshape": lambda t: t.reshape(4, -1),
    "repeat_kv": lambda t: t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, -1, DIM),
    "to": lambda t: t.to(torch.bfloat16),
    "float": lambda t: t.float() * 1,
    "sum": lambda t: t.sum(),
    "where": lambda t: torch.where(t > 0, t, torch.zeros(())),
    "einsum": lambda t: torch.einsum("bhsd,bhtd->bhst", t, t),
    "split": lambda t: t.split(20, 2)[1],
    "contiguous": lambda t: t.contiguous() + 0,
    "numpy": lambda t: torch.from_numpy((t + 0).numpy()),
}


@ANY
@pytest.mark.parametrize("read", READS)
def test_any_read_dequantizes(spec, read):
    _, packed = pack(spec)
    result = READS[read](packed)
    assert type(result) is torch.Tensor
    assert torch.equal(result, READS[read](packed.dequantize()))


WRITES = {
    "add_": lambda t: t.add_(1),
    "+=": lambda t: t.__iadd__(1),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(torch.zeros(2, 2, 53, DIM)),
    "index_copy_": lambda t: t.index_copy_(2, torch.tensor([0]), torch.zeros(2, 2, 1, DIM)),
    "setitem": lambda t: t.__setitem__((slice(None), slice(None), 3), 0.0),
    "setitem everything": lambda t: t.__setitem__(..., 0.0),
    "setitem by tensor": lambda t: t.__setitem__((slice(None), slice(None), torch.tensor([1])), 0.0),
    "out": lambda t: torch.add(torch.zeros(2, 2, 53, DIM), 1, out=t),
}


@ANY
@pytest.mark.parametrize("write", WRITES)
def test_in_place_writes_are_refused_never_lost(spec, write):
    _, packed = pack(spec)
    before = packed.dequantize()
    with pytest.raises(KVPassError, match="append"):
        WRITES[write](packed)
    assert torch.equal(packed.dequantize(), before)


@ANY
def test_reading_a_packed_tensor_into_a_plain_one_is_a_read(spec):
    _, packed = pack(spec)
    plain = torch.zeros(packed.shape)
    plain.copy_(packed)
    assert torch.equal(plain, packed.dequantize())
    plain += packed
    assert torch.equal(plain, packed.dequantize() + packed.dequantize())
    plain[:, :, 3:] = packed[:, :, 3:]
    assert torch.equal(plain[:, :, 3:], packed.dequantize()[:, :, 3:])


@ANY
@pytest.mark.parametrize("chunks", [[1] * 30, [40, 1, 7], [100]])
def test_append_grows_the_shape_and_equals_packing_at_once(spec, chunks):
    x, packed = pack(spec)
    y = randn(5, 2, 2, sum(chunks), DIM)
    for chunk in y.split(chunks, 2):
        packed = packed.append(chunk)
    n = 53 + y.shape[2]
    assert packed.shape == (2, 2, n, DIM) and type(packed) is PackedKV
    whole = PackedKV.from_float(torch.cat([x, y], 2), spec, queries_for(spec, 0, 2, 2))
    assert_same_contents(packed.state, whole.state, n)


@ANY
def test_a_clone_is_packed_and_independent(spec):
    _, packed = pack(spec)
    before, copy = packed.dequantize(), packed.clone()
    assert type(copy) is PackedKV and torch.equal(copy.dequantize(), before)
    assert not {t.data_ptr() for _, t in copy.state.tensors()} & {t.data_ptr() for _, t in packed.state.tensors()}
    copy.append(randn(1, 2, 2, 60, DIM))
    assert torch.equal(packed.dequantize(), before)


@ANY
def test_detach_shares_storage_and_stays_packed(spec):
    _, packed = pack(spec)
    detached = packed.detach()
    assert type(detached) is PackedKV and detached.codes.data_ptr() == packed.codes.data_ptr()
    assert torch.equal(detached.dequantize(), packed.dequantize())


@ANY
def test_flatten_and_unflatten_round_trip(spec):
    _, packed = pack(spec)
    names, context = packed.__tensor_flatten__()
    assert ("compensation" in names) == (spec.quantizer.subspace is not None)
    parts = {name: getattr(packed, name) for name in names}
    again = PackedKV.__tensor_unflatten__(parts, context, packed.shape, packed.stride())
    assert type(again) is PackedKV and again.shape == packed.shape and again.dtype == packed.dtype
    assert again.spec == packed.spec and again.num_tokens == packed.num_tokens
    assert torch.equal(again.dequantize(), packed.dequantize())


@ANY
def test_packed_bytes_are_those_of_its_state(spec):
    _, packed = pack(spec)
    assert packed.nbytes_packed() == packed.state.nbytes > 0


def test_a_view_shares_storage_with_its_state():
    x = randn(0, 2, 2, 53, DIM)
    state = state_of(KEYS, x, room=200)
    view = PackedKV.view(state, 53)
    state.append(randn(1, 2, 2, 3, DIM), 53)
    assert view.codes is state.codes and torch.equal(view.decode(), state.dequantize(53))


@pytest.mark.parametrize("tokens", [0, 1, 2, 17])
def test_short_and_empty_tensors_can_be_packed(tokens):
    x, packed = pack(KEYS, tokens)
    assert packed.shape == x.shape and torch.equal(packed.dequantize(), x if tokens < 18 else packed.dequantize())


@pytest.mark.parametrize(
    "x, spec, says",
    [
        (torch.zeros(2, 30, DIM), KEYS, r"\[B, H_kv, n, D\].*\(2, 30, 16\)"),
        (torch.zeros(1, 2, 30, DIM, dtype=torch.int64), KEYS, "float.*int64"),
        (torch.zeros(1, 2, 30, 12), VALUES, "group_size=8 does not divide head_dim=12"),
        (torch.zeros(1, 2, 30, DIM), SUBSPACE, "queries"),
    ],
)
def test_from_float_says_what_is_wrong_with_its_input(x, spec, says):
    with pytest.raises(KVPassError, match=says):
        PackedKV.from_float(x, spec)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", [5, 52], ids=["packed", "in the window"])
def test_from_float_refuses_non_finite_values_wherever_they_end_up(poison, token):
    x = randn(0, 1, 1, 53, DIM)
    x[0, 0, token, 3] = poison
    with pytest.raises(NonFiniteError):
        PackedKV.from_float(x, KEYS)


def test_the_storage_dtype_of_params_follows_the_cache():
    for dtype in DTYPES:
        _, packed = pack(VALUES, dtype=dtype)
        assert packed.scale.dtype == params_dtype(dtype) and packed.ring.dtype == dtype


def test_old_names_work_and_say_what_they_are_called_now():
    _, packed = pack(KEYS)
    with pytest.warns(DeprecationWarning, match="renamed to PackedKV.dequantize"):
        assert torch.equal(packed.decode(), packed.dequantize())
    with pytest.warns(DeprecationWarning, match="renamed to quantize_pages"):
        assert kvpass.codec.encode_pages is kvpass.codec.quantize_pages
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvpass.codec.nothing
