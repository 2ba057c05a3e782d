"""Codecs of papers, each held to what its paper says: closed bits, bounds of errors, and independent formulations."""

import pytest
import torch

from kvpass import HeavyHitter, KVPassError, Recent, Sinks
from kvpass.schemes import LayerGeometry, get

from tiny import llama, step_by_step, tokens


def geometry(index=0, num_layers=1, head_dim=64):
    return LayerGeometry(index, num_layers, 2, head_dim, torch.float32, torch.device("cpu"))


# ---------------------------------------------------------------- layers that are skipped


@pytest.mark.parametrize("name", ["kivi", "higgs", "squat", "waterfill", "logquant", "rtn", "quarot", "asymkv"])
def test_skipped_layers_are_stored_exactly_and_with_the_same_tokens_exact(name):
    scheme = get(name, skip_layers=[1, 2])
    plans = [scheme.plan_of(geometry(i, 6)) for i in range(6)]
    inside = get(name).plan(geometry(1, 6))
    for i, plan in enumerate(plans):
        assert plan.key.quantizer.raw == plan.value.quantizer.raw == (i not in (1, 2, 3))
        assert (plan.key.retention, plan.value.retention) == (inside.key.retention, inside.value.retention)
        assert plan.key.transform.pre_rope == inside.key.transform.pre_rope
    assert get(scheme.to_dict()) == scheme


def test_skipped_layers_take_any_scheme_that_stores_layers_alone():
    scheme = get("kivi", skip_layers=(1, 0), skipped="kivi-8", sinks=2)
    assert [scheme.plan_of(geometry(i, 2)).key.bits for i in range(2)] == [8, 2]
    evicting = get("kivi", skip_layers=(1, 0), retention=Sinks(2) + HeavyHitter(64, recent=32))
    assert len({evicting.plan_of(geometry(i, 2)).key.retention for i in range(2)}) == 1


@pytest.mark.parametrize(
    "name, fields, says",
    [
        ("xquant", dict(), "depend on each other"),
        ("aqua", dict(), "depend on each other"),
        ("qaq", dict(), "depend on each other"),
        ("kivi", dict(skip_layers=(-1, 0)), "skip_layers=-1"),
        ("kivi", dict(skip_layers=(1,)), "skip_layers"),
        ("kivi", dict(skipped="xquant"), "must store each layer by itself"),
        ("kivi", dict(skipped="nope"), "Unknown scheme"),
        ("kivi", dict(skipped="logquant", retention=Sinks(4) + Recent(32)), "LogQuant is its retention policy"),
    ],
)
def test_layers_that_cannot_be_skipped_say_so(name, fields, says):
    with pytest.raises(KVPassError, match=says):
        get(name, **{"skip_layers": (1, 1), **fields})


@torch.no_grad()
def test_a_model_with_skipped_layers_compiles_to_what_it_is_eagerly_and_counts_their_bytes():
    ids, scheme = tokens(2, 100), get("kivi", skip_layers=(1, 1))
    runs = [step_by_step(llama(layers=4), scheme, ids, 80, lowering=lowering) for lowering in ("auto", "eager")]
    torch.testing.assert_close(runs[0][0], runs[1][0], atol=1e-4, rtol=1e-4)
    assert runs[0][2].packed == runs[0][2].fused == 4
    sizes = [layer.nbytes for layer in runs[0][1].layers]
    assert sizes[0] == sizes[3] > 2 * sizes[1] == 2 * sizes[2]
    everywhere = step_by_step(llama(layers=4), get("kivi", skip_layers=(4, 0)), ids, 80, lowering="eager")
    model = llama(layers=4)
    torch.testing.assert_close(everywhere[0], model(ids).logits[:, 79:], atol=1e-4, rtol=1e-4)
