"""Split a call that reads a prompt into calls that read its parts, and find out for which models that changes nothing.

Nothing is assumed about a model: both ways are run on a short random prompt and compared. What a short prompt cannot
show, because it depends on the length, is looked up in the config; what is not known there keeps prompts whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from .arguments import CACHE_NAMES, handing
from .encoded import has_encoder
from .probe import fresh_cache
from .recording import asks_for
from .unpacked import window_of

_BY_TOKEN = {"input_ids": 1, "inputs_embeds": 1, "position_ids": 1, "cache_position": 0}
"""Arguments with one entry per token, and the dimension of the tokens."""

_OPTIONS = "use_cache", "return_dict", "logits_to_keep"
_ROWS = "logits", "last_hidden_state"
_ROPE_TYPES = "default", "linear", "llama3", "yarn", "proportional"
"""RoPE whose tables do not depend on the number of tokens."""

_REACHES = "window", "chunk", "block", "local", "stride", "topk"
"""Words in names of config fields that may hold a distance or a number of tokens."""

_LONGEST = 512  # distance that is tried; a longer one would make the tried prompt long
_MORE, _NEXT, _PADDING = 48, 4, 5


def why_not_plain(model: nn.Module, given: dict[str, Any], seen: int, tokens: int, first: int) -> str:
    """Why a call with the arguments ``given`` cannot be split; empty if it can.

    seen, tokens: number of tokens in the cache, and in the call.
    first: tokens of the first part, the only ones that may be padding.
    """
    given = {name: value for name, value in given.items() if value is not None and name not in CACHE_NAMES}
    mask = given.pop("attention_mask", None)
    unknown = [
        name for name, value in given.items() if value is not False and name not in _BY_TOKEN and name not in _OPTIONS
    ]
    if unknown:
        return f"the call has {', '.join(sorted(unknown))}"
    if asks_for("hidden_states", model, given) or asks_for("attentions", model, given):
        return "the call asks for hidden states or attentions"
    if given.get("return_dict") is False:
        return "the call asks for a tuple"
    if "input_ids" in given and "inputs_embeds" in given:
        return "the call has input_ids and inputs_embeds"
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        return "logits_to_keep is not a number of tokens"
    for name, dim in _BY_TOKEN.items():
        value = given.get(name)
        known = value is None or (isinstance(value, Tensor) and value.ndim == dim + 1 + (name == "inputs_embeds"))
        if not known or (value is not None and value.shape[dim] != tokens):
            return f"{name} has not one entry per token"
    if mask is None:
        return ""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < seen + tokens:
        return "the mask is not a 2-D mask of all tokens"
    behind = mask[:, seen + (0 if seen else first) : seen + tokens]
    return "" if bool(behind.all()) else "the mask hides tokens behind the first part"


def stops(tokens: int, size: int) -> list[int]:
    """Where parts of at most ``size`` and nearly equal length of ``tokens`` tokens end, after a 0."""
    count = -(-tokens // size)
    return [tokens * i // count for i in range(count + 1)]


def parts(given: dict[str, Any], seen: int, tokens: int, size: int) -> Iterator[tuple[dict[str, Any], bool]]:
    """The calls that read the ``tokens`` of the call ``given`` in parts of at most ``size`` and nearly equal length,
    and whether the caller wants logits of each. ``seen``: number of tokens in the cache."""
    mask, keep = given.get("attention_mask"), given.get("logits_to_keep") or tokens
    for first, last in pairwise(stops(tokens, size)):
        part = dict(given)
        for name, dim in _BY_TOKEN.items():
            if isinstance(value := given.get(name), Tensor):
                part[name] = value.narrow(dim, first, last - first)
        if isinstance(mask, Tensor):
            part["attention_mask"] = mask[:, : seen + last]
        wanted = min(last, max(first, tokens - min(keep, tokens)))
        if given.get("logits_to_keep"):
            part["logits_to_keep"] = max(1, last - wanted)
        yield part, wanted < last


def in_parts(call: Callable[..., Any], given: dict[str, Any], seen: int, tokens: int, size: int) -> Any:
    """The output of ``call(**given)``, read in parts as `parts` splits it."""
    rows, output = [], None
    for part, wanted in parts(given, seen, tokens, size):
        output = call(**part)
        name = _row(output)
        if wanted:
            rows.append(output[name])
    assert output is not None  # there is at least one token
    output[name] = torch.cat(rows, 1)
    return output


def _row(output: Any) -> str:
    return next(name for name in _ROWS if name in output)


def why_whole(model: nn.Module, call: Callable[..., Any], names: Collection[str]) -> str:
    """Why ``model`` has to read prompts whole in calls with the arguments ``names``; empty if parts are proven to give
    the same. Runs it, by ``call``, its own forward, on a short prompt."""
    if has_encoder(model):
        return "the model has an encoder"
    if not type(model).__module__.startswith("transformers."):
        return f"the code of {type(model).__name__} is not from transformers, and may depend on the length of a prompt"
    layers = fresh_cache(model).layers
    if other := {type(one).__name__ for one in layers if type(one) is not DynamicLayer and window_of(one) is None}:
        return f"cache layers are of the kind {', '.join(sorted(other))}, for which a short prompt proves nothing"
    config: Any = model.config
    reach = max([0, *(window for one in layers if (window := window_of(one)) is not None)])
    for name, value in _fields(config.get_text_config(decoder=True).to_dict()):
        if name == "rope_type" and value not in _ROPE_TYPES:
            return f"rope_type={value!r} may depend on the length of a prompt"
        if "capacity" in name and value:
            return f"{name}={value!r} may limit how many tokens of a call an expert takes"
        if type(value) is int and any(word in name for word in _REACHES):
            reach = max(reach, value)
    if reach > _LONGEST:
        return f"the config has a window or a block of {reach} tokens, for which a short prompt proves nothing"
    try:
        with torch.no_grad():
            return _why_unequal(model, call, names, 2 * reach + _MORE)
    except Exception as error:  # models raise anything
        return f"a short prompt failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _fields({str(key): item for key, item in value.items()})
        else:
            yield name, value


def _why_unequal(model: nn.Module, call: Callable[..., Any], names: Collection[str], tokens: int) -> str:
    """Run a prompt and some tokens that follow, whole and in two and three parts."""
    seed = torch.Generator().manual_seed(0)
    table = model.get_input_embeddings()  # type: ignore[operator]
    rows = 2 if "attention_mask" in names else 1
    ids = torch.randint(table.num_embeddings, (rows, tokens + _NEXT), generator=seed).to(table.weight.device)
    found = [_outputs(model, call, names, ids, tokens, size) for size in (tokens, -(-tokens // 2), -(-tokens // 3))]
    fields = {name for outputs in found for output in outputs for name in output} - {*_ROWS, *CACHE_NAMES}
    if fields or any(type(output) is not type(found[0][0]) for outputs in found for output in outputs):
        return f"outputs have other fields than logits and the cache: {', '.join(sorted(fields)) or 'of other classes'}"
    for outputs in found[1:]:
        for one, other in zip(outputs, found[0], strict=True):
            if not _equal(one[_row(one)], other[_row(other)], tokens if rows > 1 else 0):
                return "a short prompt read in parts gave another result than read whole"
    return ""


def _outputs(
    model: nn.Module, call: Callable[..., Any], names: Collection[str], ids: Tensor, tokens: int, size: int
) -> list[Any]:
    """The outputs of the first ``tokens`` of ``ids``, read in parts of ``size``, and of the others, read whole."""
    cache = handing(model, fresh_cache(model))
    prompt = _arguments(model, names, ids, 0, tokens) | cache
    rest = _arguments(model, names, ids, tokens, ids.shape[1]) | cache
    return [in_parts(call, prompt, 0, tokens, size), call(**rest)]


def _arguments(model: nn.Module, names: Collection[str], ids: Tensor, first: int, last: int) -> dict[str, Any]:
    """The call of tokens ``[first, last)`` with the arguments ``names``; the first of two rows begins with padding."""
    rows, tokens = ids[:, first:last], torch.arange(last, device=ids.device)
    mask = torch.ones(len(ids), last, dtype=torch.int64, device=ids.device)
    if len(ids) > 1:
        mask[0, :_PADDING] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, first:]
    known = dict(
        attention_mask=mask, position_ids=positions, cache_position=tokens[first:], use_cache=True, return_dict=True,
        logits_to_keep=min(_NEXT, last - first) + 1 if first == 0 else 1,
    )  # fmt: skip
    text = dict(input_ids=rows)
    if "inputs_embeds" in names:
        text = dict(inputs_embeds=model.get_input_embeddings()(rows))  # type: ignore[operator]
    return text | {name: value for name, value in known.items() if name in names}


def _equal(one: Tensor, other: Tensor, padded: int) -> bool:
    """Whether rows ``[B, S, D]`` are equal up to rounding. padded: the length of a prompt whose first sequence
    begins with padding, which does not count."""
    if one.shape != other.shape:
        return False
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    one, other = one.float(), other.float()
    close = (one - other).square().mean(-1).sqrt() <= tolerance * other.square().mean(-1).sqrt()
    if one.shape[1] == padded:
        close[0, :_PADDING] = True
    return bool(close.all())
