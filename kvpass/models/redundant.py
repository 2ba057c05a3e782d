"""Which arguments of a model say no more than leaving them out.

Callers say the same in many ways: ``generate`` passes ``use_cache=True``, other loops do not. Calls of one form share a
compiled graph, so kvpass leaves out what is redundant. Whether it is depends on the model: both ways are tried and
compared. Positions are never left out. Without them some models count from 0 at every call, others from
``padding_idx + 1``, others from what an earlier image left behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import CACHE_NAMES, handing
from .encoded import has_encoder
from .probe import fresh_cache, some_tokens

MASKS = "attention_mask", "decoder_attention_mask"
_OTHERS = "logits_to_keep", "use_cache", "return_dict"
_COMPARED = {"input_ids", "position_ids", "decoder_input_ids", "encoder_outputs", *CACHE_NAMES}
"""Arguments of the calls that are compared, besides those that may be redundant."""

_PROMPT, _STEP = 3, 2


class RedundantArguments:
    """What is redundant for one model: masks of ones, ``logits_to_keep`` of all tokens, ``use_cache=True``,
    ``return_dict=True``. Runs the model on a few tokens, with and without ``position_ids``."""

    def __init__(self, model: nn.Module):
        uncompiled = torch.compiler.set_stance("force_eager")  # also where a user has compiled the forward
        with torch.no_grad(), uncompiled, _evaluating(model):
            self._found = {positioned: _redundant(model, positioned) for positioned in (False, True)}

    @staticmethod
    def compared(names: Collection[str]) -> bool:
        """Whether ``names`` are of arguments that calls were compared with."""
        return _COMPARED.issuperset(set(names).difference(MASKS, _OTHERS))

    def among(self, names: Collection[str]) -> frozenset[str]:
        """Those of the arguments ``names`` that can be left out of a call that has just these, if their values are as
        above. None can if there are others, such as images or token types: nothing was compared with them."""
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
    """What comes of a prompt and a step with the arguments ``names``: the kind of output and what it holds, logits, and
    keys and values of each layer. None if the model does not take these arguments."""
    cache, seen, kinds, tensors = fresh_cache(model), 0, [], []
    try:
        for count in (_PROMPT, _STEP):
            seen += count
            output = model(**_arguments(model, count, seen, positioned, names), **handing(model, cache))
            kinds += [type(output).__name__, str(list(output))] if isinstance(output, dict) else [str(type(output))]
            tensors.append(output[0])
    except Exception:  # whatever a model raises for arguments that it does not take
        return None
    parts = [getattr(cache, name, cache) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for part in parts for layer in part.layers]
    tensors += [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return kinds, [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def _arguments(model: nn.Module, count: int, seen: int, positioned: bool, names: Iterable[str]) -> dict[str, Any]:
    """The last ``count`` of ``seen`` tokens, the padding token among them."""
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
    """Whether two `_facts` are the same within rounding."""
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
