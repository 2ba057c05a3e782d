"""A user-defined codec. Everything above the first line of dashes defines it, in this file and no other: a parameter, a
tensor fitted to a sequence, one more tensor per page, and how attention reads its pages."""

from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.cache.state import KVState
from kvpass.cache.tensor import PackedKV
from kvpass.codec import Codec, CodecSpec, Kept, dequantize_pages, parse, quantize_pages
from kvpass.codec.pages import Affine
from kvpass.lowering.inductor.page_view import Pages, plain, views
from kvpass.lowering.inductor.planes import Planes
from kvpass.lowering.table import DispatchKey, select
from kvpass.runtime.saved import load_cache, save_cache
from kvpass.schemes import KIVIConfig, LayerPlan

from common import coded, randn
from tiny import llama, tokens


@dataclass(frozen=True)
class Equalized(Codec, name="equalized"):
    """Divides channels by a power of their mean size in the tokens packed first, and quantizes them. Each page also
    stores the mean error of its tokens.

    power: of the mean size; 0 leaves channels unchanged.
    """

    power: float

    tensors = {**Affine.tensors, "error": Kept(lambda spec, head_dim: (1, head_dim))}
    quantizes_with = ("size",)
    dequantizes_with = ("size",)

    def check(self, spec: CodecSpec) -> None:
        if not 0 <= self.power <= 1:
            raise KVPassError(f"power={self.power} must be from 0 to 1.")

    def sequence(self, spec):
        return {"size": Kept(lambda spec, head_dim: (1, head_dim), torch.float32)}

    def fit_tokens(self, kept, x, valid, spec):
        there = torch.ones(len(x), x.shape[2]) if valid is None else valid.float()
        total = (x.float().abs() * there[:, None, :, None]).sum(2, keepdim=True)
        kept["size"].copy_((total / there.sum(-1)[:, None, None, None].clamp_min(1)).clamp_min(1e-3) ** self.power)

    def quantize(self, x, spec, fitted=()):
        kept = quantize_pages((x.float() / fitted[0]).to(x.dtype), spec.plain)
        error = x.float() - dequantize_pages(*kept, spec.plain) * fitted[0]
        return *kept, error.unflatten(2, (-1, spec.page_size)).mean(-2, keepdim=True).to(kept[1].dtype)

    def dequantize(self, codes, scale, zero_point, error, size, spec):
        values = dequantize_pages(codes, scale, zero_point, spec.plain) * size
        return (values.unflatten(2, (-1, spec.page_size)) + error.float()).flatten(2, 3)


class Unread(Equalized, name="unread"):
    """The same codec, of which attention does not know how to read its pages."""


@views("equalized")
def pages_of(kept, spec, points, head_dim):
    *affine, error, size = kept
    planes = plain(affine, spec.plain.quantizer, None)
    return Pages([Planes(planes.runs, lambda plane: planes.values(plane) * size[:, None] + error.float())])


# ---------------------------------------------------------------- tests

KEYS, VALUES = (coded(2, *where, codec=Equalized(0.5)) for where in (("channel", 32, 32), ("token", 16, 32, 32)))
OPS = torch.ops.kvpass


@dataclass(frozen=True, kw_only=True)
class EqualizedConfig(KIVIConfig):
    name = "equalized"
    power: float = 0.5

    def plan(self, layer):
        codec = Equalized(self.power)
        return LayerPlan(self.key(2, codec=codec), self.value(2, codec=codec)).checked(layer)


def filled(spec, n, room=0):
    x = randn(0, 2, 2, n, 32)
    state = KVState.allocate(spec, 2, 2, 32, x.dtype, "cpu", n + room)
    state.append(x, 0)
    return state, x


@pytest.mark.parametrize("spec", [KEYS, VALUES], ids=["per channel", "per token"])
def test_states_store_grow_and_copy_it(spec):
    state, x = filled(spec, 100)
    pages = spec.retention.pages(100)
    first = x[:, :, : spec.retention.packed(100)]
    size = first.abs().mean(2, keepdim=True).sqrt()
    torch.testing.assert_close(state.size, size, rtol=1e-5, atol=0)
    expected = dequantize_pages(*quantize_pages(first, spec, [state.size]), state.size, spec)
    assert torch.equal(state.dequantize(100)[:, :, : spec.retention.packed(100)], expected)
    assert [name for name, _ in state.tensors()] == ["_codes", "scale", "zero_point", "error", "ring", "size"]
    assert state.contents(100)["error"].shape == (2, 2, pages, 1, 32)
    without, _ = filled(spec.plain, 100)
    assert state.nbytes == without.nbytes + state.error.nbytes + state.size.nbytes
    off = [(one.dequantize(100) - x).square().mean() for one in (state, without)]
    assert off[0] < off[1]
    for part in randn(1, 3, 2, 2, 90, 32):
        state.append(part, 100)
    packed = PackedKV.from_float(x, spec)
    assert torch.equal(packed.clone().dequantize(), packed.dequantize()) and "error" in packed.__tensor_flatten__()[0]


@pytest.mark.usefixtures("reference_in_this_test")
def test_ops_support_it():
    (key, _), (value, _) = filled(KEYS, 70, room=20), filled(VALUES, 70, room=20)
    q, new = randn(1, 2, 4, 1, 32), randn(2, 2, 2, 1, 32)
    texts = key.text, value.text
    torch.library.opcheck(OPS.quantize.default, (randn(3, 2, 2, 64, 32), [key.size], texts[0]))
    torch.library.opcheck(OPS.dequantize.default, (key.pack, key.length_tensor(70), texts[0]))
    torch.library.opcheck(OPS.append_.default, (key.pack, key.length_tensor(70), new, None, None, texts[0]))
    past = key.pack, value.pack, key.length_tensor(70)
    torch.library.opcheck(OPS.attend.default, (q, *past, new, new, None, False, 0.2, 0.0, *texts))
    with pytest.raises(KVPassError, match="stores codes, scale, zero_point, error, ring, size; got 4 tensors"):
        OPS.dequantize(key.pack[:4], key.length_tensor(70), texts[0])


@pytest.mark.parametrize("op", ["quantize", "append_", "append_layers_", "dequantize", "attend"])
def test_kernels_without_support_leave_it_to_the_reference(op):
    codec = (Unread if op == "attend" else Equalized)(0.5)
    key, value = (str(coded(2, *where, codec=codec)) for where in (("channel", 32, 32), ("token", 16, 32, 32)))
    dispatch = DispatchKey(op, "cpu", (key, value) if op == "attend" else (key,), 1, 64)
    assert select(dispatch).name == "reference"
    with pytest.raises(KVPassError, match=f"it does not support codec={codec.name}"):
        select(dispatch, "inductor")


@pytest.mark.slow
def test_attention_reads_its_pages():
    (key, _), (value, _) = filled(KEYS, 150), filled(VALUES, 150)
    q, new = randn(1, 2, 4, 1, 32), randn(2, 2, 2, 1, 32)
    given = q, key.pack, value.pack, key.length_tensor(150), new, new, None, False, 0.2, 0.0, key.text, value.text
    (got,), (expected,) = (OPS.attend(*given, name) for name in ("auto", "reference"))
    assert select(DispatchKey("attend", "cpu", (key.text, value.text), 1, 32)).name == "inductor"
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_unsupported_combinations_are_refused():
    with pytest.raises(KVPassError, match="supports neither eviction"):
        coded(2, "token", 16, 32, codec=Equalized(0.5), budget=64)
    with pytest.raises(KVPassError, match=r"power=2\.0 must be"):
        coded(2, "token", 16, 32, codec=Equalized(2.0))
    with pytest.raises(KVPassError, match="power must be a finite number, not 'a'"):
        Equalized("a")
    for text in (str(KEYS).replace("equalized", "nonsense"), str(KEYS).replace('"power"', '"other"')):
        with pytest.raises(KVPassError, match=r"no codec 'nonsense'|does not take these parameters"):
            parse(text)


def test_a_codec_has_a_name_of_its_own_and_tensors_of_other_names_than_states(monkeypatch):
    with pytest.raises(KVPassError, match=r"belongs to kvpass\.codec\.nuq\.PageDatatype"):

        class Another(Equalized, name="nuq"):
            pass

    class Unnamed(Equalized):
        pass

    with pytest.raises(KVPassError, match="Unnamed has no name of its own"):
        coded(2, "token", 16, 32, codec=Unnamed(0.5))
    monkeypatch.setattr(
        Equalized, "sequence", lambda self, spec: {"writes": Kept(lambda spec, head_dim: (1, head_dim))}
    )
    with pytest.raises(KVPassError, match=r"cannot name its tensors \['writes'\]"):
        KVState.allocate(coded(3, "token", 16, 32, codec=Equalized(0.5)), 1, 1, 32, torch.float32, "cpu", 40)


def test_its_parameters_are_part_of_the_spec():
    assert parse(str(KEYS)) == KEYS != coded(2, "channel", 32, 32, codec=Equalized(0.25))
    assert "codec=equalized" in KEYS.features and isinstance(KEYS, CodecSpec)


@torch.no_grad()
def test_a_model_packs_by_it_and_its_attention_is_fused(tmp_path):
    ids, logits, caches = tokens(2, 110), [], []
    for lowering in ("eager", "auto"):
        model = kvpass.apply(llama(), EqualizedConfig(), lowering=lowering)
        cache = DynamicCache(config=model.config)
        rows = [model(input_ids=ids[:, :95], past_key_values=cache).logits[:, -1]]
        rows += [model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(95, 110)]
        logits.append(torch.stack(rows))
        caches.append(cache)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    report = kvpass.explain(model)
    assert report.fused == 2 and {graph.lowerings["attend"] for graph in report.graphs} == {"inductor"}
    mine, theirs = (cache.layers[0].key_state for cache in reversed(caches))
    assert (
        mine.spec.retention.pages(110) > mine.spec.retention.pages(95)
        and mine.error[:, :, : mine.spec.retention.pages(110)].any()
    )
    torch.testing.assert_close(mine.window(110), theirs.window(110), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine.size, theirs.size, atol=1e-5, rtol=1e-5)
    loaded = load_cache(save_cache(caches[1], tmp_path / "prompt.safetensors"), model)
    again, past = loaded.layers[1].value_state, caches[1].layers[1].value_state
    assert torch.equal(again.size, past.size) and torch.equal(again.dequantize(110), past.dequantize(110))
    caches[1].crop(-90)  # no page is left: the next one is fitted anew
    model(input_ids=tokens(2, 60, seed=5), past_key_values=caches[1])
    assert not torch.equal(past.size, again.size)
