"""Threads that share an applied model, each with its own cache, get the results of a single thread. `threads` runs more
trials."""

import threading

import pytest
import torch
from threads import SCHEMES, alone, assert_same, at_once, forget, generated, trial
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.lowering.inductor import aot
from kvpass.lowering.session import compiling

from tiny import llama, tokens

EAGER = [(8, "logquant"), (2, "squat"), (8, "kivi"), (2, "qaq"), (2, "waterfill, static"), (2, "waterfill, hybrid")]


@pytest.mark.nightly_cases("2-qaq", "2-waterfill, hybrid")
@pytest.mark.parametrize("threads, scheme", EAGER)
def test_eager_threads_get_the_same_as_one(threads, scheme):
    trial(SCHEMES[scheme], "eager", threads, alone(SCHEMES[scheme], "eager", threads))


@pytest.mark.slow
@pytest.mark.nightly_cases("8-*")
@pytest.mark.parametrize("threads, scheme", [(2, "kivi"), (8, "logquant")])
def test_compiling_threads_get_the_same_as_one(threads, scheme):
    """All threads start at once, before anything is compiled."""
    trial(SCHEMES[scheme], "auto", threads, alone(SCHEMES[scheme], "auto", threads))


@pytest.mark.slow
def test_a_thread_that_decodes_is_not_disturbed_by_one_that_brings_a_new_shape():
    model = kvpass.apply(llama(), "kivi")
    one = generated(model, 0, 8)
    stop, steps = threading.Event(), []

    def goes_on():
        while not stop.is_set():
            assert_same(generated(model, 0, 8), one)
            steps.append(1)
        return steps

    def brings_new_shapes():
        try:
            before = len(steps)
            out = [model.generate(tokens(batch, 70), max_new_tokens=8, do_sample=False) for batch in (2, 3)]
            return out, len(steps) - before
        finally:
            stop.set()

    _, (out, meanwhile) = at_once([goes_on, brings_new_shapes])
    assert meanwhile > 1
    eager = kvpass.apply(llama(), "kivi", lowering="eager")
    for got, batch in zip(out, (2, 3), strict=True):
        assert torch.equal(got, eager.generate(tokens(batch, 70), max_new_tokens=8, do_sample=False))


def test_threads_with_one_form_of_call_compile_it_once():
    forget()
    model = kvpass.apply(llama(), "kivi-pre", lowering="eager")
    at_once([lambda: generated(model, 0, 3)] * 4)
    assert len(kvpass.explain(model).graphs) == 2  # a prompt, a step


def test_eager_models_run_while_another_thread_compiles():
    """torch then sets a flag for the whole process. Because of it, keys stored before rotary embedding were read
    without dequantizing."""
    model = kvpass.apply(llama(), "kivi", lowering="eager")
    expected = generated(model, 0, 8)
    with compiling():
        (got,) = at_once([lambda: generated(model, 0, 8)])
    assert_same(got, expected)


def test_a_cache_in_use_is_refused_and_stays_usable():
    model = kvpass.apply(llama(), "kivi", lowering="eager")
    cache, inside, leave = DynamicCache(config=model.config), threading.Event(), threading.Event()
    ids = tokens(1, 40)

    def wait(*_):
        inside.set()
        assert leave.wait(60)

    def first():
        hook = model.model.layers[1].register_forward_pre_hook(wait)
        try:
            return model(input_ids=ids, past_key_values=cache).logits
        finally:
            hook.remove()

    def second():
        assert inside.wait(60)
        try:
            with pytest.raises(KVPassError, match="Another thread is using this cache"):
                model(input_ids=ids, past_key_values=cache)
        finally:
            leave.set()

    logits, _ = at_once([torch.no_grad()(first), torch.no_grad()(second)])
    with torch.no_grad():
        assert torch.equal(logits, model(input_ids=ids).logits)
        assert model(input_ids=ids[:, :1], past_key_values=cache).logits.isfinite().all()
    assert cache.get_seq_length() == 41 and not model._kvpass.running


def test_drafts_are_counted_for_each_cache():
    model = kvpass.apply(llama(), "kivi", lowering="eager")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for count, cache in [(40, 0), (40, 1), (5, 0), (5, 1), (5, 0), (1, 1)]:
            model(input_ids=tokens(1, count), past_key_values=caches[cache])
    assert [cache.layers[0].cache.drafts for cache in caches] == [2, 0]


def test_the_report_is_always_that_of_one_cache():
    model = kvpass.apply(llama(), "kivi", lowering="eager")
    report, seen = kvpass.explain(model), set()

    def use(batch):
        with torch.no_grad():
            for _ in range(30):
                model(input_ids=tokens(batch, 40))
                state = dict(vars(report))
                rows = {(row.nbytes, row.full_nbytes) for row in state["layers"]}
                seen.add((state["batch"], *rows))
                str(report)

    at_once([lambda batch=batch: use(batch) for batch in (1, 3)])
    assert {batch for batch, *_ in seen} == {1, 3}
    assert all(len(rows) == 1 for _, *rows in seen) and len(seen) == 2


def test_a_kernel_is_made_by_the_first_of_several_threads(monkeypatch):
    made = []
    monkeypatch.setattr(aot, "compile_ahead", lambda program, place: made.append(program.fn) or object())

    @aot.Kernel
    def named(key):
        if key == "wrong":
            raise ValueError(key)
        return aot.Program(key, [aot.Input("x", torch.empty(1))])

    results = at_once([lambda: named("right")] * 8)
    assert made == ["right"] and len(set(map(id, results))) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            named("wrong")
    assert made == ["right"]
