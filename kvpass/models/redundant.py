"""Find arguments of a model that change nothing compared with leaving them out.

Callers say the same in many ways: ``generate`` passes ``use_cache=True``, other loops do not. Calls of one form share a
compiled graph, so kvpass leaves redundant arguments out. Whether one is redundant depends on the model, so both ways
are run and compared. Positions are never left out: without them some models count from 0 in every call, others from
``padding_idx + 1``, others from what an earlier image left behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.swap import cache_layers
from .arguments import CACHE_NAMES, handing
from .encoded import has_encoder
from .probe import fresh_cache, some_tokens

MASKS = "attention_mask", "decoder_attention_mask"
_OTHERS = "logits_to_keep", "use_cache", "return_dict"
_COMPARED = {"input_ids", "position_ids", "decoder_input_ids", "encoder_outputs", *CACHE_NAMES}
"""Arguments that the compared calls have besides the candidates."""

_PROMPT, _STEP = 3, 2


class RedundantArguments:
    """The redundant arguments of one model, among masks of ones, ``logits_to_keep`` of all tokens, ``use_cache=True``
    and ``return_dict=True``. Runs the model on a few tokens, with and without ``position_ids``."""

    def __init__(self, model: nn.Module):
        uncompiled = torch.compiler.set_stance("force_eager")  # also if the user has compiled the forward
        with torch.no_grad(), uncompiled, _evaluating(model):
            self._found = {positioned: _redundant(model, positioned) for positioned in (False, True)}

    @staticmethod
    def compared(names: Collection[str]) -> bool:
        """Whether all of ``names`` are arguments that were part of the compared calls."""
        return _COMPARED.issuperset(set(names).difference(MASKS, _OTHERS))

    def among(self, names: Collection[str]) -> frozenset[str]:
        """Which of the arguments ``names`` can be left out of a call that has exactly these, given the values above.
        None can if the call has others, such as images or token types, because they were not part of the comparison."""
        found = self._found["position_ids" in names]
        return found.intersection(names) if found.union(_COMPARED).issuperset(names) else frozenset()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _redundant(model: nn.Module, positioned: bool) -> frozenset[str]:
    plain = _facts(model, positioned, ())
    if plain is None:
        return frozenset()
    names = [*MASKS[: 1 + has_encoder(model)], *_OTHERS]
    if _agree(_facts(model, positioned, names), plain):
        return frozenset(names)
    return frozenset(name for name in names if _agree(_facts(model, positioned, [name]), plain))


def _facts(model: nn.Module, positioned: bool, names: Iterable[str]) -> tuple[list[str], list[Tensor]] | None:
    """The results of a prompt and a step with the arguments ``names``: kind and fields of the outputs, logits, and keys
    and values of each layer. None if the model does not take these arguments."""
    cache, seen, kinds, tensors = fresh_cache(model), 0, [], []
    try:
        for count in (_PROMPT, _STEP):
            seen += count
            output = model(**_arguments(model, count, seen, positioned, names), **handing(model, cache))
            kinds += [type(output).__name__, str(list(output))] if isinstance(output, dict) else [str(type(output))]
            tensors.append(output[0])
    except Exception:  # models raise anything for arguments that they do not take
        return None
    tensors += [getattr(layer, name, None) for layer in cache_layers(cache) for name in ("keys", "values")]
    return kinds, [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def _arguments(model: nn.Module, count: int, seen: int, positioned: bool, names: Iterable[str]) -> dict[str, Any]:
    """The call for the last ``count`` of ``seen`` tokens, which include the padding token."""
    given = some_tokens(model, 1, count)
    ids = given["decoder_input_ids" if has_encoder(model) else "input_ids"]
    padding = getattr(model.config, "pad_token_id", None)
    if isinstance(padding, int) and padding >= 0:
        ids = given["decoder_input_ids" if has_encoder(model) else "input_ids"] = ids.clone()
        ids[:, -1] = padding
    if positioned:
        given["position_ids"] = torch.arange(seen - count, seen, device=ids.device)[None]
    ones = torch.ones(1, seen, dtype=torch.int64, device=ids.device)
    encoded = given.get("encoder_outputs")
    sources = ones if encoded is None else ones.new_ones(1, encoded.last_hidden_state.shape[1])
    values = {"attention_mask": sources, "decoder_attention_mask": ones, "logits_to_keep": count}
    return given | {name: values.get(name, True) for name in names}


def _agree(one: tuple[list[str], list[Tensor]] | None, other: tuple[list[str], list[Tensor]]) -> bool:
    """Whether two results of `_facts` are equal up to rounding."""
    if one is None or one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return all(_close(x, y) for x, y in zip(one[1], other[1], strict=True))


def _close(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or not x.is_floating_point():
        return x.shape == y.shape and torch.equal(x, y)
    if not x.numel():
        return True
    tolerance = torch.finfo(x.dtype).eps ** 0.5 * y.float().square().mean().sqrt()
    return bool((x.float() - y.float()).abs().max() <= tolerance)
