"""Plain PyTorch decoders are found, packed and fused as they are written, and restored by `kvpass.remove`."""

import pytest
import torch
from decoders import CatDecoder, IndexPutDecoder, SliceAssignDecoder
from torch import nn

import kvpass
from kvpass import KVPassError, PackedKV
from kvpass.schemes import IdentityConfig, KIVIConfig

from tiny import tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")

PROMPT, TOTAL, CAPACITY = 40, 61, 128
LOSSLESS, LOSSY = IdentityConfig(residual=16), KIVIConfig(residual=16, group_size=16)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


class ByIndex:
    """Positions are passed as a tensor."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = IndexPutDecoder().eval()
        self.model.setup_caches(2, CAPACITY)
        self.example = dict(idx=tokens(2, 8), input_pos=torch.arange(8))

    def step(self, ids, start, cache):
        return self.model(ids, torch.arange(start, start + ids.shape[1])), None

    def buffers(self):
        return [t for layer in self.model.layers for t in (layer.kv_cache.k_cache, layer.kv_cache.v_cache)]


class BySlice:
    """The first position is passed as an int; tokens come before heads."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = SliceAssignDecoder(tokens=CAPACITY).eval()
        self.example = (tokens(2, 8), 0)

    def step(self, ids, start, cache):
        return self.model(ids, start), None

    def buffers(self):
        return [t.transpose(1, 2) for layer in self.model.layers for t in (layer.cache_k, layer.cache_v)]


class ByHand:
    """The cache is passed in and out."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = CatDecoder().eval()
        self.example = (tokens(2, 8),)

    def step(self, ids, start, cache):
        return self.model(ids, cache)


KINDS = [ByIndex, BySlice, ByHand]


@torch.no_grad()
def run(kind, ids, prompt=PROMPT, start=0, cache=None):
    """Logits after the prompt and each later token, and the cache that was returned last."""
    rows, stop = [], start + prompt
    while stop <= start + ids.shape[1]:
        part = ids[:, 0 if stop == start + prompt else stop - start - 1 : stop - start]
        logits, cache = kind.step(part, stop - part.shape[1], cache)
        rows.append(logits[:, -1])
        stop += 1
    return torch.stack(rows, 1), cache


def apply(kind, scheme, **options):
    return kvpass.apply(kind.model, scheme, example_inputs=kind.example, **options)


def compiled_graphs(kind):
    return [graph for graph in kvpass.explain(kind.model).graphs if graph.compiled]


@pytest.mark.slow
@pytest.mark.nightly_cases("BySlice*")
@pytest.mark.compiles
@pytest.mark.parametrize("make", KINDS)
def test_lossless_pages_change_nothing_and_codes_equal_those_of_eager(make):
    kind, ids = make(), tokens(2, TOTAL)
    expected, plain = run(kind, ids)
    kept = [buffer.clone() for buffer in kind.buffers()] if make is not ByHand else None

    apply(kind, LOSSLESS, strict=True)
    got, cache = run(kind, ids)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    report = kvpass.explain(kind.model)
    assert (report.packed, report.fused, len(compiled_graphs(kind))) == (2, 2, 1)
    assert report.tokens == TOTAL
    assert torch.equal(run(kind, ids)[0], got)  # a second text needs no second graph
    run(kind, tokens(2, 55, seed=1), prompt=33)
    assert len(compiled_graphs(kind)) == 1
    if make is ByHand:
        for mine, theirs in zip(sum(cache, ()), sum(plain, ()), strict=True):
            torch.testing.assert_close(mine + 0, theirs, atol=1e-5, rtol=1e-5)
    else:
        run(kind, ids)
        assert all(buffer.is_meta for buffer in kind.buffers())
    kvpass.remove(kind.model)
    if make is not ByHand:
        for buffer, before in zip(kind.buffers(), kept, strict=True):
            torch.testing.assert_close(buffer, before, atol=1e-5, rtol=1e-5)
    assert torch.equal(run(kind, ids)[0], expected)

    apply(kind, LOSSY)
    compiled, _ = run(kind, ids)
    kvpass.remove(kind.model)
    apply(kind, LOSSY, lowering="eager")
    eager, _ = run(kind, ids)
    torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(eager, expected, atol=1e-3)


@pytest.mark.slow
def test_values_follow_their_keys_in_either_write_order():
    """The same model in two versions, one of which writes its values first."""
    ids, scheme, found = tokens(2, TOTAL), dict(scheme="waterfill", recent=0, residual=16), []
    for make in (ByIndex, BySlice):
        apply(kind := make(), scheme, lowering="eager")
        found.append(run(kind, ids)[0])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.nightly_cases("ByIndex-squat-pre")
@pytest.mark.compiles
@pytest.mark.parametrize(("make", "scheme"), [(ByIndex, "squat-pre"), (ByHand, "squat")])
def test_edges_of_a_scheme_are_found_in_plain_decoders(make, scheme):
    kind, ids = make(), tokens(2, TOTAL)
    expected, _ = run(kind, ids)
    apply(kind, scheme, strict=True)
    got, _ = run(kind, ids)
    assert kvpass.explain(kind.model).fused == 2
    if scheme.endswith("pre"):
        assert compiled_graphs(kind)[0].rotated == 2
    assert 1e-4 < (got - expected).abs().max() < 0.2


@pytest.mark.parametrize("make", [ByIndex, BySlice])
def test_an_earlier_position_crops_the_cache_and_chunks_append(make):
    kind, ids = make(), tokens(2, TOTAL)
    apply(kind, LOSSY, lowering="eager")
    expected, _ = run(kind, ids)
    kind.step(ids[:, :PROMPT], 0, None)
    kind.step(tokens(2, 5, seed=2), PROMPT, None)
    got, _ = run(kind, ids[:, PROMPT:], prompt=3, start=PROMPT)  # over the five
    torch.testing.assert_close(got[:, -1], expected[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [ByIndex, BySlice])
def test_positions_that_leave_out_tokens_are_refused(make):
    kind, ids = make(), tokens(2, TOTAL)
    apply(kind, LOSSY, lowering="eager")
    kind.step(ids[:, :PROMPT], 0, None)
    with pytest.raises(KVPassError, match=f"starts at {PROMPT + 1}, but the packed cache holds {PROMPT}"):
        kind.step(ids[:, :1], PROMPT + 1, None)
    with pytest.raises(KVPassError, match="cache is full"):
        kind.step(tokens(2, CAPACITY), PROMPT, None)
    kind.step(ids[:, PROMPT : PROMPT + 1], PROMPT, None)  # no token was lost
    assert kvpass.explain(kind.model).tokens == PROMPT + 1
    if make is ByIndex:
        with pytest.raises(KVPassError, match="consecutive"):
            kind.model(ids[:, :3], torch.tensor([0, 2, 4]))


@pytest.mark.slow_cases("auto")
@pytest.mark.parametrize("lowering", ["eager", "auto"])
def test_a_call_that_fails_loses_nothing(lowering):
    kind, ids = ByIndex(), tokens(2, TOTAL)
    apply(kind, LOSSY, lowering="eager")
    expected, _ = run(kind, ids)
    kvpass.remove(kind.model)
    apply(kind, LOSSY, lowering=lowering)
    kind.step(ids[:, :PROMPT], 0, None)
    with pytest.raises(Exception, match="index out of"):
        kind.step(torch.full((2, 1), 10_000), PROMPT, None)
    assert all(buffer.is_meta for buffer in kind.buffers())
    got, _ = run(kind, ids[:, PROMPT:], prompt=1, start=PROMPT)
    torch.testing.assert_close(got, expected[:, 1:], atol=1e-4, rtol=1e-4)


def test_caches_that_the_model_resets_are_noticed():
    kind = ByIndex()
    apply(kind, LOSSY, lowering="eager")
    kind.model.setup_caches(2, CAPACITY)
    with pytest.raises(KVPassError, match=r"replaced after kvpass\.apply"):
        kind.step(tokens(2, 8), 0, None)


def test_a_returned_cache_looks_like_tensors_and_can_be_used_once():
    kind, ids = ByHand(), tokens(2, TOTAL)
    apply(kind, LOSSY, lowering="eager")
    _, first = kind.step(ids[:, :PROMPT], 0, None)
    assert isinstance(first[0][0], PackedKV)
    assert first[0][0].shape == (2, 2, PROMPT, 32)
    _, second = kind.step(ids[:, PROMPT : PROMPT + 1], PROMPT, first)
    with pytest.raises(KVPassError, match="was already continued to 41"):
        kind.step(ids[:, PROMPT : PROMPT + 1], PROMPT, first)
    with pytest.raises(KVPassError, match="not what this model returned"):
        kind.step(ids[:, :1], 0, [tuple(x + 0 for x in pair) for pair in second])
    other = ByHand()
    apply(other, LOSSY, lowering="eager")
    with pytest.raises(KVPassError, match="another model"):
        other.step(ids[:, :1], 0, second)


class Counting(SliceAssignDecoder):
    """Counts its tokens itself."""

    start = 0

    def forward(self, tokens):
        logits = super().forward(tokens, self.start)
        self.start += tokens.shape[1]
        return logits


class Unmasked(IndexPutDecoder):
    """Does not mask unwritten slots."""

    def forward(self, idx, input_pos):
        self.causal_mask.fill_(True)
        return super().forward(idx, input_pos)


def test_refusals_say_why_a_decoder_cannot_be_packed():
    ids, position = tokens(2, 8), torch.arange(8)
    counting, unmasked = Counting().eval(), Unmasked().eval()
    unmasked.setup_caches(2, CAPACITY)
    for model, inputs, message in (
        (counting, (ids,), "no argument gives them"),
        (unmasked, (ids, position), "not been written yet"),
        (ByIndex().model, (ids,), "do not match IndexPutDecoder.forward"),
        (ByIndex().model, (ids, position + CAPACITY), "failed on its example_inputs"),
        (nn.Linear(4, 4), (torch.ones(2, 4),), "No packable attention"),
    ):
        before = {name: tensor.clone() for name, tensor in model.named_buffers()}
        with pytest.raises(KVPassError, match=message):
            kvpass.apply(model, LOSSY, example_inputs=inputs)
        assert not hasattr(model, "_kvpass")
        if model is not unmasked:
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())
    for scheme in ("kivi+h2o", "streaming-llm"):
        with pytest.raises(KVPassError, match="Evicting"):
            apply(ByIndex(), scheme)


def test_a_model_in_training_mode_is_refused():
    kind = ByIndex()
    apply(kind, LOSSY)
    kind.model.train()
    with pytest.raises(KVPassError, match=r"model\.eval\(\)"):
        kind.step(tokens(2, 8), 0, None)
