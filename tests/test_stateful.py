"""Layers that keep a recurrent or convolution state besides keys and values: these are packed, the state stays."""

import pytest
import torch

import kvpass
from kvpass import KVPassError
from kvpass.schemes import IdentityConfig

from tiny import called, check_rows_are_selected, check_saved_loaded_and_reset, falcon_h1, left_padded, tokens

LOSSLESS = IdentityConfig(residual=8)


MODES = {
    "greedy": dict(input_ids=tokens(1, 60)),
    "left padding": left_padded(),
    "beams": dict(input_ids=tokens(1, 30), num_beams=3),
}


@pytest.fixture(scope="module")
def model():
    return falcon_h1()


@pytest.fixture
def applied(model):
    yield kvpass.apply(model, LOSSLESS, lowering="eager")
    kvpass.remove(model)


def generated(model, mode):
    given = dict(MODES[mode], max_new_tokens=20, do_sample=False, return_dict_in_generate=True, output_logits=True)
    out = model.generate(**given)
    return out.sequences, torch.stack(out.logits, 1)


@pytest.mark.parametrize("mode", MODES)
def test_generate_gives_the_tokens_and_logits_of_the_untouched_model(model, mode, request):
    expected = generated(model, mode)
    found = generated(request.getfixturevalue("applied"), mode)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0)
    assert kvpass.explain(model).packed == 2


@pytest.mark.slow
def test_a_step_is_captured_with_the_state_in_it(reference_lowering):
    model = falcon_h1()
    calls = [(20, 0), *[(1, 0)] * 12]
    expected, _ = called(model, calls)
    kvpass.apply(model, LOSSLESS)
    found, _ = called(model, calls)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    report = kvpass.explain(model)
    assert report.fused == 2 and len(report.graphs) == 1


def test_keys_and_state_are_saved_loaded_and_reset_together(applied, tmp_path):
    check_saved_loaded_and_reset(applied, tmp_path)


def test_rows_of_keys_and_state_are_selected_together(applied):
    check_rows_are_selected(applied, atol=1e-6)


def test_a_recurrent_state_is_not_cropped_and_the_cache_stays_as_it_was(applied):
    _, cache = called(applied, [(20, 0)])
    with pytest.raises(KVPassError, match=r"crop\(-1\): layer 0 keeps a recurrent state.*copy.deepcopy"):
        cache.crop(-1)
    assert not cache.is_croppable and cache.get_seq_length() == 20
    with torch.no_grad():
        applied(input_ids=tokens(2, 1), past_key_values=cache)


def test_after_a_failed_call_the_cache_is_refused_because_the_state_was_written(applied):
    _, cache = called(applied, [(20, 0)])
    weight, applied.lm_head.weight = applied.lm_head.weight, None
    with pytest.raises(TypeError), torch.no_grad():
        applied(input_ids=tokens(2, 1), past_key_values=cache)
    applied.lm_head.weight = weight
    with pytest.raises(KVPassError, match="inconsistent"), torch.no_grad():
        applied(input_ids=tokens(2, 1), past_key_values=cache)
    cache.reset()
    with torch.no_grad():
        applied(input_ids=tokens(2, 5), past_key_values=cache)
