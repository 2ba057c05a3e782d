"""Figures by layer, against what they must be where that is known."""

import json

import pytest
import torch

from kvpass.cli import main
from kvpass.errors import NotSimulatedError
from kvpass.eval.diagnostics import alike, deviation, diagnose, explained
from kvpass.runtime.simulated import Simulator
from kvpass.schemes import IdentityConfig, KIVIConfig

from common import coded, randn, state_of
from tiny import llama, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture(scope="module")
def simulator():
    torch._dynamo.reset()
    return Simulator(llama(layers=3))


def kivi(bits=2, residual=16):
    return KIVIConfig(bits=bits, residual=residual, group_size=16)


def test_lossless_storage_has_no_errors_and_more_bits_have_smaller_ones(simulator):
    ids = tokens(1, 120)
    exact, two, four = (diagnose(simulator, ids, 80, each) for each in (IdentityConfig(residual=16), kivi(2), kivi(4)))
    assert len(exact) == len(two) == 3
    for none, coarse, fine in zip(exact, two, four, strict=True):
        assert none.attention < 1e-5 and none.output < 1e-9 and none.same_keys is None
        assert 0 < fine.attention < coarse.attention < 2 and 0 < fine.output < coarse.output
        assert coarse.coverage == pytest.approx(fine.coverage, abs=0.05)
    assert two[0].explained_keys is None and two[1].explained_keys < 1 and two[1].same_keys is not None
    assert two[0].coverage == pytest.approx(exact[0].coverage, abs=1e-6)  # the first layer sees the same inputs


@pytest.mark.slow
def test_attention_that_reads_only_the_window_is_covered(simulator):
    found = diagnose(simulator, tokens(1, 60), 40, kivi(residual=64))
    assert all(layer.coverage == pytest.approx(1) and layer.attention < 1e-5 for layer in found)
    assert all(layer.same_keys is None for layer in found)  # there are no pages


def test_queries_within_the_subspace_of_the_prompt_do_not_deviate():
    basis = randn(0, 1, 2, 5, 16)
    inside = (randn(1, 1, 2, 2, 60, 5) @ basis.unsqueeze(2)).flatten(1, 2)
    assert deviation(inside, 2, 40) == pytest.approx(0, abs=1e-6)
    assert deviation(torch.cat([inside[:, :, :40], randn(2, 1, 4, 4000, 16)], 2), 2, 40) == pytest.approx(
        11 / 16, abs=0.02
    )


def test_codes_of_independent_layers_are_equal_by_chance_and_of_one_layer_always():
    spec, x = coded(2, "token", 16, 16), randn(0, 1, 2, 160, 16)
    one, same, other = (state_of(spec, each) for each in (x, x, randn(1, 1, 2, 160, 16)))
    assert alike(one, same, 160)[0] == 1
    share, chance = alike(one, other, 160)
    assert share == pytest.approx(chance, abs=0.03) and 0.2 < chance < 0.5
    assert alike(one, state_of(coded(4, "token", 16, 16), x), 160) == (None, None)


def test_a_probe_explains_a_linear_map_and_nothing_of_noise():
    x = randn(0, 1, 2, 400, 8)
    y = (x.transpose(1, 2).flatten(2) @ randn(1, 16, 16) + 3).unflatten(-1, (2, 8)).transpose(1, 2)
    assert explained([x], y) > 0.999
    assert abs(explained([x], randn(2, 1, 2, 400, 8))) < 0.2


def test_schemes_that_take_many_passes_are_refused(simulator):
    with pytest.raises(NotSimulatedError, match="attention scores"):
        diagnose(simulator, tokens(1, 60), 40, "h2o")


def test_the_command_prints_a_table_and_draws_a_picture_of_each(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from kvpass import models
    from kvpass.eval import texts

    monkeypatch.setattr(models, "load", lambda *args, **options: (llama(), None))
    monkeypatch.setattr(texts, "tokens", lambda tokenizer, source, count: tokens(1, count))
    sizes = ["--context", "150", "--score", "40", "--json", str(tmp_path / "found.json"), "--svg", str(tmp_path)]
    assert main(["diagnose", *sizes]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(json.loads((tmp_path / "found.json").read_text())) == 3
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "attention.svg", "coverage.svg", "queries.svg", "codes.svg", "probes.svg",
    }  # fmt: skip
