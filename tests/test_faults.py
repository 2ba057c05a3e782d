"""Out-of-memory errors and Ctrl-C at any step of a call over a cache: the cache is as before or as after the call, or
it refuses every use until it is reset.

``pytest tests/test_faults.py --faults 0`` tries every line of kvpass that runs, instead of some, and prints a table.
"""

import zlib

import pytest
import torch

from kvpass import KVPassError

import kinds
from faults import ERRORS, outcomes
from kinds import KINDS, answers, copied, feed, filled, same

pytestmark = pytest.mark.filterwarnings("ignore:crop from")
CALLS = {
    "a prompt": (0, lambda cache: feed(cache, 21, 1)),
    "a step": (43, lambda cache: feed(cache, 1, 1)),
    "a step that packs or evicts": (None, lambda cache: feed(cache, 1, 1)),
    "many tokens": (43, lambda cache: feed(cache, 70, 1)),
    "crop": (43, lambda cache: cache.crop(-3)),
    "crop beyond the window": (43, lambda cache: cache.crop(-38)),
    "reorder": (43, lambda cache: cache.reorder_cache(torch.tensor([1, 0]))),
    "select": (43, lambda cache: cache.batch_select_indices(torch.tensor([1, 1]))),
    "reset": (43, lambda cache: cache.reset()),
}
"""The number of tokens stored before (None: until the next token completes a page), and the call."""
FEW = "a step", "a step that packs or evicts", "many tokens", "select"


@pytest.fixture(scope="module", params=KINDS)
def packed(request):
    """The name of a kind of state, and a model with it."""
    torch._dynamo.reset()
    return request.param, kinds.packed(KINDS[request.param])


def possible(kind: str, name: str, every: bool) -> bool:
    """Whether a call is possible, and short enough."""
    if "not packed" in kind and name in ("crop", "crop beyond the window", "reorder", "select"):
        return False  # transformers changes other layers one by one; an interrupted change goes unnoticed
    if name.startswith("crop") and "states" in kind:
        return False  # refused: no earlier recurrent state is kept
    if name == "crop beyond the window" and "+" in kind:
        return False  # evicted tokens are gone
    if name == "select" and "cross" in kind:
        return False  # transformers refuses it
    return every or not KINDS[kind].captured or name in FEW


@pytest.mark.slow_cases("*kivi before RoPE*", "*kivi+*", "*qaq*")
@pytest.mark.parametrize("fault", ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_a_failed_call_leaves_a_consistent_cache_or_one_that_refuses(packed, name, fault, request, record_property):
    (kind, model), (stored, call) = packed, CALLS[name]
    tried = request.config.getoption("faults")
    if not possible(kind, name, every=tried != 6):
        pytest.skip("cannot be, or takes long")
    before = filled(model, stored)
    after = copied(before)
    call(after)
    unchanged, changed, fresh = answers(before), answers(after), answers(filled(model, 0))
    assert not same(unchanged, changed)

    def verdict(cache) -> str:
        try:
            got = answers(cache)
        except KVPassError as error:
            assert "cache.reset()" in str(error)
            cache.reset()
            return "refused" if same(answers(cache), fresh) else "REFUSED, AND NOT MENDED BY RESET"
        return "as before" if same(got, unchanged) else "as after" if same(got, changed) else "WRONG"

    seed = zlib.crc32(f"{kind} {name} {fault}".encode())
    found = outcomes(lambda: copied(before), call, verdict, ERRORS[fault], tried or None, seed)
    record_property("fault", (kind, name, fault, dict(found)))
    assert set(found) <= {"as before", "as after", "refused"}, found
