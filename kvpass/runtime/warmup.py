"""Compile ahead of time what ``generate`` will need."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product

import torch
from torch import nn

from ..errors import KVPassError
from ..fields import check_integer
from ..models.arguments import handing
from ..models.probe import as_generate_passes, fresh_cache
from .applied import decoder, runtime_of
from .runtime import Runtime
from .transformers import TransformersRuntime

_DRAFTS, _TURN = 4, 24  # tokens of a call that verifies drafts, and of a chat turn, which is longer


def warmup(
    model: nn.Module,
    batch_sizes: Sequence[int] = (1,),
    *,
    padded: bool = False,
    drafts: bool = False,
    turns: bool = False,
    background: bool = False,
) -> Future[None]:
    """Compile what prompts and decode steps of ``model`` need, so that no user waits for it.

    This prefills and decodes a short text in a temporary cache, with the arguments that ``generate`` passes. One graph
    serves all lengths. Graphs compiled outside ``torch.inference_mode`` are not used inside it.

    Args:
        model: a transformers model that `kvpass.apply` packed.
        batch_sizes: batch sizes to expect. 1 has its own graph, and so may the first larger one; others share one.
        padded: also compile for batches whose first sequence is padded on the left.
        drafts: also compile for prompt lookup and assisted generation, which verify several tokens per call.
        turns: also compile for prompts that continue a filled cache: chats, and chunked prefill.
        background: return at once and compile in a thread. Calls that need the same graphs wait for it.

    Returns a future; its ``result()`` waits, and raises any error. Without ``background`` errors are raised here.

    Raises `KVPassError` if `apply` has not packed the model, or if the model keeps its cache itself: warmup would
    overwrite its text, so call the model once instead.
    """
    runtime = runtime_of(model)
    if not isinstance(runtime, TransformersRuntime):
        raise KVPassError(
            "kvpass.warmup can neither call a decoder from outside transformers nor touch the text in its cache: run "
            "the model once on a prompt of yours, then for one more token."
        )
    for size in batch_sizes:
        check_integer("batch_sizes", size, 1)
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        report = runtime.report
        before = report.layers, report.tokens, report.batch
        with torch.inference_mode() if inference else torch.no_grad():
            for size, padding in product(batch_sizes, (0, 1) if padded else (0,)):
                _read_and_decode(decoder(model), runtime, size, padding, drafts, turns)
        report.used(*before)

    if not background:
        run()
        done: Future[None] = Future()
        done.set_result(None)
        return done
    pool = ThreadPoolExecutor(1, "kvpass.warmup")
    try:
        return pool.submit(run)
    finally:
        pool.shutdown(wait=False)


def _read_and_decode(model: nn.Module, runtime: Runtime, batch: int, padding: int, drafts: bool, turns: bool) -> None:
    """Prefill a prompt that fills pages and decode a token; then, on request, verify drafts and run another chat
    turn."""
    cache, seen = fresh_cache(model), 0
    for count in (_prompt(runtime), 1, *(2 * drafts * [_DRAFTS]), *(turns * [_TURN])):
        seen += count
        wanted = count if count == _DRAFTS else 1
        given = as_generate_passes(model, batch, count, seen, padding=padding, logits=wanted)
        model(**given, **handing(model, cache), use_cache=True)


def _prompt(runtime: Runtime) -> int:
    """Length of a prompt of which every layer packs some tokens."""
    retentions = [spec.retention for plan, _ in runtime.plans.values() for spec in (plan.key, plan.value)]
    return max(each.sinks + each.ring_size + 2 * each.page_size for each in retentions)
