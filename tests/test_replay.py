"""Replayed steps, with `Rerun` in place of a CUDA graph.

It repeats a step with the host's numbers at capture. So anything that is not read on the device belongs to another
length.
"""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass.cache.swap import packed_layers
from kvpass.runtime.padding import PaddingMasks
from kvpass.runtime.steps import replay
from kvpass.runtime.steps.due_pages import is_due, pack_again

from tiny import llama, tokens

pytest.importorskip("triton", minversion="3.7")  # the interpreter of 3.6 takes named tuples for plain ones


def _graphs_traced() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Rerun:
    """A `kvpass.runtime.steps.replay.Capture` that runs the step itself again."""

    made: list["Rerun"] = []

    def __init__(self):
        self.captured = self.replayed = 0
        self.made.append(self)

    def __call__(self, state, step):
        stale, before = state.context.length, _graphs_traced()
        output = step()
        assert _graphs_traced() == before, "a step was compiled while it was captured, which CUDA does not allow"
        self.captured += 1
        logits = output.logits if hasattr(output, "logits") else output[0]
        cache = weakref.ref(state)

        def again():
            context = cache().context
            current, context.length = context.length, stale
            logits.copy_(step().logits)
            context.length = current
            self.replayed += 1

        return output, again


@pytest.fixture
def reruns(monkeypatch):
    """Capture steps on the CPU with `Rerun`."""
    monkeypatch.setitem(replay.CAPTURES, "cpu", Rerun)
    monkeypatch.setattr(Rerun, "made", [])
    return Rerun.made


def decoded(model, scheme, calls, **options):
    """Logits of each call, the cache, and the report. ``calls``: numbers of tokens, and of tokens that are cropped
    afterwards."""
    kvpass.apply(model, scheme, **options)
    cache, ids, logits = DynamicCache(config=model.config), tokens(1, sum(new for new, _ in calls)), []
    for new, rejected in calls:
        start = cache.get_seq_length()
        logits.append(model(input_ids=ids[:, start : start + new], past_key_values=cache).logits)
        if rejected:
            cache.crop(-rejected)
    report = kvpass.explain(model)
    kvpass.remove(model)
    return logits, cache, report


SCHEMES = {
    "kivi": dict(scheme="kivi", group_size=8, residual=8),
    "squat": dict(scheme="squat", group_size=8, residual=16),
    "higgs-sinks": dict(scheme="higgs-sinks", residual=8),
    "kivi-pre": dict(scheme="kivi-pre", group_size=8, residual=8),
    "waterfill": dict(scheme="waterfill", residual=16, recent=0, sinks=0),
}
STEPS = [(14, 0), *[(1, 0)] * 22]


@pytest.mark.slow_cases("higgs-sinks", "kivi-pre", "waterfill", "squat")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replayed_step_equals_the_step(scheme, reruns):
    model = llama(layers=1)
    expected, plain, _ = decoded(model, SCHEMES[scheme], STEPS, lowering="reference")
    got, cache, report = decoded(model, SCHEMES[scheme], STEPS, lowering="triton", mode="reduce-overhead")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(*(layer.states() for layer in map(first_layer, (cache, plain))), strict=True):
        torch.testing.assert_close(mine.contents(cache.get_seq_length()), theirs.contents(cache.get_seq_length()))
    (capture,) = reruns
    assert capture.captured < 4 and capture.replayed > 10
    assert "replayed as one CUDA graph" in str(report)


@pytest.mark.slow
def test_a_replayed_step_over_calibrated_widths_equals_the_step(reruns):
    model = llama(layers=1)
    how = dict(scheme="waterfill-static", residual=16, recent=0, sinks=0)
    calibration = kvpass.calibrate(model, [tokens(1, 60, seed) for seed in range(3)], how, progress=False)
    expected, *_ = decoded(model, calibration, STEPS, lowering="reference")
    got, _, report = decoded(model, calibration, STEPS, lowering="triton", mode="reduce-overhead")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert reruns[0].replayed > 10 and "replayed as one CUDA graph" in str(report)


@pytest.mark.slow_cases("no_grad")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_is_captured_when_it_runs_again_and_nothing_is_compiled_then(mode, reruns):
    """In inference mode clones are inference tensors, for which Dynamo compiles again; `Rerun` checks that."""
    with mode():
        decoded(llama(layers=1), SCHEMES["kivi"], [(14, 0), *[(1, 0)] * 4], lowering="triton", mode="reduce-overhead")
    assert reruns[0].captured == 1 and reruns[0].replayed


@pytest.mark.slow
def test_left_padded_rows_are_replayed(reruns, monkeypatch):
    """On an accelerator left padding is represented by the first token of each row, which is read from the device like
    lengths."""
    monkeypatch.setattr(PaddingMasks, "waits", staticmethod(lambda mask: True))
    ids, found = tokens(3, 14), []
    for lowering, mode in (("reference", None), ("triton", "reduce-overhead")):
        model = kvpass.apply(llama(layers=1), SCHEMES["kivi"], lowering=lowering, mode=mode)
        for hidden in ((5, 0, 11), (0, 2, 12)):
            mask = (torch.arange(14) >= torch.tensor(hidden)[:, None]).long()
            options = dict(attention_mask=mask, max_new_tokens=14, do_sample=False)
            found.append(model.generate(ids, **options, output_logits=True, return_dict_in_generate=True).logits)
    torch.testing.assert_close(found[2:], found[:2], atol=1e-5, rtol=1e-5)
    assert reruns[0].captured < 5 and reruns[0].replayed > 18


def first_layer(cache):
    return packed_layers(cache)[0]


@pytest.mark.slow
def test_layers_together_and_tokens_taken_back(reruns):
    """Due pages are packed for all layers at once, and lengths decrease after a crop."""
    model, scheme = llama(layers=2), dict(scheme="kivi", group_size=8, residual=16)
    calls = [(12, 0), *[(1, 0)] * 14, (1, 3), *[(1, 0)] * 7, (1, 1), (1, 0)]
    expected, _, _ = decoded(model, scheme, calls, lowering="reference")
    got, _, _ = decoded(model, scheme, calls, lowering="triton", mode="reduce-overhead")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert reruns[0].replayed > 10


@pytest.mark.slow
def test_a_changed_weight_recaptures_the_step(reruns):
    found = []
    for lowering, mode in (("reference", None), ("triton", "reduce-overhead")):
        model = llama(layers=1)
        kvpass.apply(model, SCHEMES["kivi"], lowering=lowering, mode=mode)
        cache = DynamicCache(config=model.config)
        for call, count in enumerate((12, *[1] * 8)):
            if call == 5:
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
            output = model(input_ids=tokens(1, count, call), past_key_values=cache)
        found.append(output.logits)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert reruns[0].captured == 2


def test_captured_steps_do_not_keep_caches_alive(monkeypatch):
    class Nothing:
        def __call__(self, layers, step):
            return step(), lambda: None

    monkeypatch.setitem(replay.CAPTURES, "cpu", Nothing)
    model = llama(layers=1)
    kvpass.apply(model, SCHEMES["kivi"], lowering="triton", mode="reduce-overhead")
    cache = DynamicCache(config=model.config)
    for count in (12, 1, 1, 1):
        output = model(input_ids=tokens(1, count), past_key_values=cache)
    assert output.past_key_values is cache
    gone = weakref.ref(cache)
    del cache, output
    gc.collect()
    assert gone() is None


@pytest.mark.slow_cases("kivi+h2o*")
@pytest.mark.parametrize(
    "scheme, options, reason",
    [
        ("kivi", dict(lowering="reference"), "reads the length on the host"),
        ("kivi+h2o", {}, "more than its own tokens"),
    ],
)
def test_a_step_that_cannot_be_replayed_says_why(scheme, options, reason, reruns):
    _, _, report = decoded(llama(layers=1), scheme, [(12, 0), (1, 0), (1, 0)], mode="reduce-overhead", **options)
    assert reason in str(report) and not any(capture.captured for capture in reruns)


@pytest.mark.parametrize("scheme", ["kivi", "waterfill", dict(scheme="rtn", residual=16, group_size=16)])
def test_pages_of_all_layers_are_packed_as_those_of_each(scheme):
    """Due pages that were packed layer by layer are erased, and packed again together."""
    model, ids = llama(layers=2), tokens(1, 33)
    kvpass.apply(model, SCHEMES.get(scheme, scheme) if isinstance(scheme, str) else scheme, lowering="reference")
    cache = DynamicCache(config=model.config)
    for start, stop in ((0, 20), *((i, i + 1) for i in range(20, 33))):
        due = start and is_due(packed_layers(cache)[0].cache, stop - start)
        model(input_ids=ids[:, start:stop], past_key_values=cache)
        if due:
            state = packed_layers(cache)[0].cache
            states = [one for layer in state.layers for one in layer.states()]
            expected = [{name: tensor.clone() for name, tensor in one.contents(stop).items()} for one in states]
            for one in states:
                one.codes[:, :, one.spec.retention.pages(stop) - 1] = 0
            pack_again(state, start)
            torch.testing.assert_close([one.contents(stop) for one in states], expected, atol=0, rtol=0)
            return
    pytest.fail("no page was due")
