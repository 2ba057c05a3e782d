"""A codec that keeps one more tensor a page. What comes above the first line of dashes is all there is to it."""

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.cache.state import KVState
from kvpass.cache.tensor import PackedKV
from kvpass.codec import CODECS, Codec, Kept, decode_pages, encode_pages
from kvpass.lowering.table import DispatchKey, select
from kvpass.schemes import KIVIConfig, LayerPlan

from common import coded, randn
from tiny import llama, tokens


def plain(spec):
    return replace(spec, quantizer=replace(spec.quantizer, codec=""))


def encode(x, spec, *_):
    """Uniform codes, and what the tokens of a page are off by on average."""
    kept = encode_pages(x, plain(spec))
    error = x.float() - decode_pages(*kept, plain(spec))
    return *kept, error.unflatten(2, (-1, spec.page_size)).mean(-2, keepdim=True).to(kept[1].dtype)


def decode(*kept_and_spec):
    *kept, error, spec = kept_and_spec
    return (decode_pages(*kept, plain(spec)).unflatten(2, (-1, spec.page_size)) + error.float()).flatten(2, 3)


DEBIASED = Codec({**CODECS[""].tensors, "error": Kept(lambda spec, head_dim: (1, head_dim))}, encode, decode)

# ---------------------------------------------------------------- what the others make of it

KEYS, VALUES = coded(2, "channel", 32, 32, codec="debiased"), coded(2, "token", 16, 32, 32, codec="debiased")
OPS = torch.ops.kvpass


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(CODECS, "debiased", DEBIASED)


@dataclass(frozen=True, kw_only=True)
class Debiased(KIVIConfig):
    name = "debiased"

    def plan(self, layer):
        return LayerPlan(self.key(2, codec="debiased"), self.value(2, codec="debiased")).checked(layer)


def filled(spec, n, room=0):
    x = randn(0, 2, 2, n, 32)
    state = KVState.allocate(spec, 2, 2, 32, x.dtype, "cpu", n + room)
    state.append(x, 0)
    return state, x


@pytest.mark.parametrize("spec", [KEYS, VALUES], ids=["per channel", "per token"])
def test_it_is_stored_read_grown_and_viewed(spec):
    state, x = filled(spec, 100)
    pages = spec.retention.pages(100)
    expected = decode(*encode(x[:, :, : spec.retention.packed(100)], spec), spec)
    assert torch.equal(state.decode(100)[:, :, : spec.retention.packed(100)], expected)
    assert [name for name, _ in state.tensors()] == ["_codes", "scale", "zero_point", "error", "ring"]
    assert state.contents(100)["error"].shape == (2, 2, pages, 1, 32)
    without, _ = filled(plain(spec), 100)
    assert state.nbytes == without.nbytes + state.error.nbytes
    off = [(one.decode(100) - x).square().mean() for one in (state, without)]
    assert off[0] < off[1]
    for part in randn(1, 3, 2, 2, 90, 32):
        state.append(part, 100)
    packed = PackedKV.from_float(x, spec)
    assert torch.equal(packed.clone().decode(), packed.decode()) and "error" in packed.__tensor_flatten__()[0]


@pytest.mark.usefixtures("reference_in_this_test")
def test_ops_take_it():
    (key, _), (value, _) = filled(KEYS, 70, room=20), filled(VALUES, 70, room=20)
    q, new = randn(1, 2, 4, 1, 32), randn(2, 2, 2, 1, 32)
    texts = key.text, value.text
    torch.library.opcheck(OPS.encode.default, (randn(3, 2, 2, 64, 32), [], texts[0]))
    torch.library.opcheck(OPS.decode.default, (key.pack, key.carrier(70), texts[0]))
    torch.library.opcheck(OPS.append_.default, (key.pack, key.carrier(70), new, None, None, texts[0]))
    past = key.pack, value.pack, key.carrier(70)
    torch.library.opcheck(OPS.attend.default, (q, *past, new, new, None, False, 0.2, 0.0, *texts))
    with pytest.raises(KVPassError, match="This codec stores codes, scale, zero_point, error, ring; got 4 tensors"):
        OPS.decode(key.pack[:4], key.carrier(70), texts[0])


@pytest.mark.parametrize("op", ["encode", "append_", "append_layers_", "decode", "attend"])
def test_kernels_that_do_not_know_it_pass_it_on(op):
    dispatch = DispatchKey(op, "cpu", (str(KEYS), str(VALUES)) if op == "attend" else (str(KEYS),), 1, 64)
    assert select(dispatch).name == "reference"
    with pytest.raises(KVPassError, match="it does not support codec=debiased"):
        select(dispatch, "inductor")


def test_what_it_cannot_be_combined_with_says_so():
    with pytest.raises(KVPassError, match="supports neither eviction"):
        coded(2, "token", 16, 32, codec="debiased", budget=64)
    with pytest.raises(KVPassError, match="no codec 'nonsense'"):
        filled(coded(2, "token", 16, 32, codec="nonsense"), 10)


@torch.no_grad()
def test_a_model_packs_by_it_and_its_attention_is_fused(tmp_path):
    ids, logits, caches = tokens(2, 110), [], []
    for lowering in ("eager", "auto"):
        model = kvpass.apply(llama(), Debiased(), lowering=lowering)
        cache = DynamicCache(config=model.config)
        rows = [model(input_ids=ids[:, :95], past_key_values=cache).logits[:, -1]]
        rows += [model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(95, 110)]
        logits.append(torch.stack(rows))
        caches.append(cache)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    report = kvpass.explain(model)
    assert report.fused == 2 and {graph.lowerings["attend"] for graph in report.graphs} == {"reference"}
    mine, theirs = (cache.layers[0].key_state for cache in reversed(caches))
    assert (
        mine.spec.retention.pages(110) > mine.spec.retention.pages(95)
        and mine.error[:, :, : mine.spec.retention.pages(110)].any()
    )
    torch.testing.assert_close(mine.window(110), theirs.window(110), atol=1e-5, rtol=1e-5)
