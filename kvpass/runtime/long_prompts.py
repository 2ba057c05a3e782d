"""Read a long prompt in chunks, so that only one chunk at a time is in full precision."""

from __future__ import annotations

import logging
from threading import Lock
from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache

from kvpass.lowering.table import FEW

from ..cache.cache_state import CacheState
from ..cache.swap import layers_of
from ..codec.tensors import of_sequence
from ..errors import KVPassError
from ..fields import shown
from ..models.prompt_parts import in_parts, stops, why_not_plain, why_whole
from .forward import refuse_what_does_not_fit, remember

if TYPE_CHECKING:
    from .transformers import TransformersRuntime

logger = logging.getLogger("kvpass")

_AUTO = "auto"
_AUTO_SIZE, _AUTO_FROM = 512, 4096
_SMALLEST = 4 * FEW  # so that no chunk is taken for drafts


def check_chunk_size(size: int | str | None) -> None:
    """Raise `KVPassError` if ``size`` is not a value of ``prefill_chunk_size``."""
    number = isinstance(size, int) and not isinstance(size, bool) and size >= _SMALLEST
    if not (size is None or size == _AUTO or number):
        raise KVPassError(
            f"prefill_chunk_size={shown(size)}: use a number of tokens, {_SMALLEST} or more, 'auto', or None to read "
            "prompts whole."
        )


class LongPrompts:
    """Decides which prompts of one model are read in chunks, and reads them.

    size: the argument ``prefill_chunk_size`` of `kvpass.apply`.
    """

    def __init__(self, runtime: TransformersRuntime, size: int | str | None):
        self._asked = isinstance(size, int)
        self._size: int | None = size if isinstance(size, int) else _AUTO_SIZE
        self._limit = size if isinstance(size, int) else _AUTO_FROM
        self._proofs: dict[frozenset[str], str] = {}
        self._one_at_a_time = Lock()
        report = runtime.report
        if size is None:
            self._size = None
        elif not self._asked and (why := _why_whole_by_default(runtime)):
            self._size = None
            report.long_prompts = f"prompts are read whole: {why}. prefill_chunk_size={_AUTO_SIZE} reads them in chunks"
        else:
            report.long_prompts = f"{self._summary}, if the first of them shows that the model allows it"

    @property
    def _summary(self) -> str:
        return f"prompts of more than {self._limit:,} tokens are read in chunks of at most {self._size:,}"

    def read(self, runtime: TransformersRuntime, cache: Cache, batch: int, tokens: int, kwargs: dict[str, Any]) -> Any:
        """The output of the model for a call of ``tokens`` tokens over ``cache``, read in chunks if that is wanted and
        proven to be equal."""
        if self._size is None or tokens <= self._limit:
            return runtime.forward_over(cache, batch, tokens, kwargs)
        put_back = layers_of(cache)
        state = runtime.adopt(cache)
        if why := self._why_whole(runtime, state, tokens, kwargs):
            report = f"the last long prompt was read whole: {why}"
            if self._asked and report != runtime.report.long_prompts:
                logger.warning("%s: %s", type(runtime.model()).__name__, report)
            runtime.report.long_prompts = report
            return runtime.forward_over(cache, batch, tokens, kwargs)
        runtime.report.long_prompts = self._summary
        undo, seen = remember(cache, state, runtime.storing_no_text), state.seen
        state.refuse_unless_whole()
        refuse_what_does_not_fit(state, batch, tokens)

        def call(**part: Any) -> Any:
            return runtime.forward_over(cache, batch, _count(part), part)

        try:
            return in_parts(call, kwargs, seen, tokens, self._size)
        except BaseException:
            if state.seen > seen:  # an earlier chunk is stored
                state.whole = False
                if not seen:
                    for layer in state.layers:
                        layer.reset()
                    state.whole = undo()
                    put_back()
            raise

    def _why_whole(self, runtime: TransformersRuntime, state: CacheState, tokens: int, kwargs: dict[str, Any]) -> str:
        model = runtime.model()
        if names := runtime.hooks():
            return f"there are hooks on {names[0]}, which would run once per chunk"
        assert self._size is not None
        if why := why_not_plain(model, kwargs, state.seen, tokens, stops(tokens, self._size)[1]):
            return why
        given = frozenset(name for name, value in kwargs.items() if value is not None)
        if state.seen and (not state.only_tokens or given not in self._proofs):
            return "what the cache holds may come from other arguments, such as images"
        with self._one_at_a_time:
            if given not in self._proofs:
                self._proofs[given] = why_whole(model, runtime.original, given)
            return self._proofs[given]


def _count(part: dict[str, Any]) -> int:
    inputs = part.get("input_ids")
    return (part["inputs_embeds"] if inputs is None else inputs).shape[1]


def _why_whole_by_default(runtime: TransformersRuntime) -> str:
    """Why prompts are not read in chunks unless the caller asks for it: chunks would be stored in another way than the
    whole prompt, or cost time. Empty if nothing speaks against chunks."""
    specs = [spec for plan, _ in runtime.plans.values() for spec in (plan.key, plan.value)]
    if runtime.needs_queries:
        return "the scheme is fitted to the queries of the whole prompt"
    if runtime.needs_importance:
        return "the scheme uses the attention scores of the whole prompt"
    if fitted := {name for spec in specs for name, kept in of_sequence(spec).items() if not kept.calibrated}:
        return f"the scheme fits {', '.join(sorted(fitted))} to the whole prompt"
    if runtime.captures or runtime.one_graph:
        return "the scheme captures prompts as graphs, and would capture chunks once more"
    if others := {layer.device.type for _, layer in runtime.plans.values()} - {"cpu"}:
        return f"on {', '.join(sorted(others))} each chunk dequantizes the cache before it, which is slower"
    return ""
