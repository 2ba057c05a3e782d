"""Attention of several query tokens on CPUs: dequantizes a tile of the past at a time.

Each tile is multiplied with all queries before the next one is dequantized, and a running softmax combines them. So no
more than one tile of keys and values is ever in memory, for every codec that can dequantize its pages. If a mask hides
most of the past, as in sparse attention, a tile consists of pages with visible tokens, and of those only visible tokens
are multiplied.
"""

from collections.abc import Callable, Iterator
from math import lcm

import torch
from torch import Tensor

from kvpass.codec.rope import rotate
from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.tensors import Pack
from kvpass.layout.window import layout

from . import reference
from .call_types import AttendCall, DequantizeCall
from .partial_attention import Partial, attend_partially
from .reference import dequantize_predicted, read_pages, with_past, with_starts
from .table import EAGER, LATENT, DispatchKey, implements

_VALUES = 1 << 19  # keys to dequantize at a time


class _Stored:
    """The keys, or the values, of a past. Tokens are numbered in storage order: sinks, pages, window."""

    def __init__(self, past: Pack, n: int, spec: CodecSpec, dequantize_fn: Callable, rotary=None):
        self._call, self._dequantize, self._rotary = DequantizeCall(past, n, spec), dequantize_fn, rotary
        self._sinks = min(n, spec.retention.sinks)
        self._window_from = self._sinks + spec.retention.packed(n)
        self._window, self.head_dim = layout(spec.retention).read(past.ring, n), past.ring.shape[3]

    def read(self, places: slice | Tensor, tokens: Tensor | slice) -> Tensor:
        """The tokens at ``places`` as attention sees them, ``[B, H, T, D]`` in the dtype of the cache.

        tokens: the same tokens, numbered in token order.
        """
        x = self._between(places.start, places.stop) if isinstance(places, slice) else self._at(places)
        if self._rotary is None:
            return x
        cos, sin, rope = self._rotary
        return rotate(x, cos[:, tokens], sin[:, tokens], rope)

    def _between(self, first: int, last: int) -> Tensor:
        (ring, size), sinks, end = (self._call.pack.ring, self._call.spec.page_size), self._sinks, self._window_from
        parts = []
        if first < sinks:
            parts.append(ring[:, :, first : min(last, sinks)])
        start, stop = max(first, sinks) - sinks, min(last, end) - sinks
        if start < stop:
            page = start // size
            values = read_pages(self._dequantize, self._call, slice(page, -(-stop // size)))
            parts.append(values[:, :, start - page * size : stop - page * size].to(ring.dtype))
        if last > end:
            parts.append(self._window[:, :, max(first, end) - end : last - end])
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _at(self, places: Tensor) -> Tensor:
        (ring, size), sinks, end = (self._call.pack.ring, self._call.spec.page_size), self._sinks, self._window_from
        parts = [ring[:, :, places[places < sinks]], self._window[:, :, places[places >= end] - end]]
        packed = places[(places >= sinks) & (places < end)] - sinks
        if len(packed):
            pages, which = torch.unique(packed // size, return_inverse=True)
            values = read_pages(self._dequantize, self._call, pages)
            parts.insert(1, values[:, :, which * size + packed % size].to(ring.dtype))
        return torch.cat(parts, 2)


def refuses(dispatch: DispatchKey) -> str | None:
    """Why tiles cannot serve attention, or None if they can."""
    return "it runs on CPUs." if dispatch.device != "cpu" else refuses_call(dispatch)


def refuses_call(dispatch: DispatchKey) -> str | None:
    """Why attention cannot be computed in tiles, whatever the device, or None."""
    if not dispatch.specs:
        return "the past is already dequantized."
    if dispatch.queries == 1 and LATENT not in dispatch.extras:
        return "it attends with several query tokens."
    if "attention mass" in dispatch.extras:
        return "it does not return attention mass."
    specs = [parse(text) for text in dispatch.specs]
    if any(spec.transform.predictor or spec.quantizer.adaptive is not None for spec in specs):
        return "other layers or other tokens are needed to dequantize a page."
    key, value = (spec.retention for spec in specs)
    if (key.sinks, key.keep) != (value.sinks, value.keep) or (key.keep == "log" and key != value):
        return "keys and values must be stored in the same order."
    return None


@implements("attend", "tiled", refuses=refuses, lowering=EAGER)
def attend(call: AttendCall[Pack]) -> list[Tensor]:
    return attend_in_tiles(call, dequantize_predicted)


def attend_in_tiles(call: AttendCall[Pack], dequantize_fn: Callable) -> list[Tensor]:
    """What ``call`` returns. A past that fits into one tile is dequantized as a whole."""
    if call.n <= _tile(call):
        return reference.attend(call, dequantize_fn)
    found = _in_tiles(with_past(with_starts(call)), dequantize_fn)
    out = found.out.to(call.q.dtype).contiguous()
    return [out, found.lse] if call.with_lse else [out]


def _tile(call: AttendCall[Pack]) -> int:
    """Tokens of the past to dequantize at a time, whole pages of keys and of values."""
    size = lcm(*(spec.page_size for spec in call.specs))
    return max(1, _VALUES // (size * call.key.ring[:, :, 0].numel())) * size


def _in_tiles(call: AttendCall[Pack], dequantize_fn: Callable) -> Partial:
    """The attention of ``call``, which has no ``starts``: out ``[B, H_q, S, D_v]``, lse ``[B, H_q, S]``."""
    n, mask = call.n, call.mask
    keys = _Stored(call.key, n, call.k_spec, dequantize_fn, call.rotary)
    values = _Stored(call.value, n, call.v_spec, dequantize_fn)
    order = layout(call.k_spec.retention).token_order(n)
    tokens = None if order is None else order.argsort()  # the token at each place of the storage order
    found = _over_present(call)
    rows = _rows(call.q, call)
    for places in _tiles(call, tokens):
        here = places if tokens is None else tokens[places]
        part = None if mask is None else mask[..., here]
        if part is not None and part.dtype == torch.bool and not part.any():
            continue
        k, v = keys.read(places, here), values.read(places, here)
        of_tile = attend_partially(rows, *_heads(call, k, v), _bias(call, part), call.scale, call.softcap)
        found = of_tile if found is None else found.and_also(of_tile)
    shape = *call.q.shape[:3], (keys if call.latent else values).head_dim
    if found is None:  # every token is hidden
        found = Partial.over_nothing(shape, call.q.device)
    found = Partial(found.out.reshape(shape), found.lse.reshape(shape[:3]))
    return found if call.sinks is None else found.with_sinks(call.sinks)


def _tiles(call: AttendCall[Pack], tokens: Tensor | None) -> Iterator[slice | Tensor]:
    """The places, in storage order, of the tokens to dequantize at a time: of all, or of those that are visible if they
    are less than half. tokens: the token at each place; None if they are in order."""
    n, tile, sinks = call.n, _tile(call), call.k_spec.retention.sinks
    seen = _seen(call)
    if seen is None:
        for first in range(0, n, tile):
            # the sinks are part of the first tile, so that the others, but for the last, consist of whole pages
            start, stop = first + sinks if first else 0, min(n, first + tile + sinks)
            if start < stop:
                yield slice(start, stop)
        return
    places = (seen if tokens is None else seen[tokens]).nonzero().squeeze(1)
    size = lcm(*(spec.page_size for spec in call.specs))
    _, page = ((places - sinks).clamp_min(0) // size).unique_consecutive(return_inverse=True)
    yield from places.split((page // (tile // size)).bincount().tolist())


def _seen(call: AttendCall[Pack]) -> Tensor | None:
    """Which tokens of the past are visible to a query, ``[n]`` bool; None if most are, or if only whole tiles can be
    read."""
    mask, n = call.mask, call.n
    if mask is None or call.key.page_tables is not None:
        return None
    seen = mask
    if mask.dtype != torch.bool:  # the lowest finite number hides a token, unless it hides all
        seen = mask > torch.finfo(mask.dtype).min
        if not seen.any(-1).all():
            return None
    seen = seen[..., :n].flatten(0, 2).any(0)
    return seen if 2 * seen.sum() < n else None


def _over_present(call: AttendCall) -> Partial | None:
    """Attention over the tokens of the call; None if there are none."""
    if not call.k_new.shape[2]:
        return None
    k, v = _heads(call, call.k_new, call.v_new)
    mask = None if call.mask is None else call.mask[..., call.n :]
    if not (call.causal or _is_causal(mask)):
        bias = None if mask is None else _bias(call, mask)
        return attend_partially(_rows(call.q, call), k, v, bias, call.scale, call.softcap)
    k, v = (x.repeat_interleave(call.q.shape[1] // x.shape[1], 1) for x in (k, v))
    part = attend_partially(call.q, k, v, None, call.scale, call.softcap, causal=True)
    return Partial(_rows(part.out, call), _rows(part.lse, call))


def _is_causal(mask: Tensor | None) -> bool:
    """Whether ``mask``, over the tokens of the call, only hides later tokens: attention then needs no bias, which would
    take memory for every query head and pair of tokens."""
    if mask is None or mask.dtype != torch.bool:
        return False
    return torch.equal(mask, torch.ones_like(mask[:1, :1]).tril().expand_as(mask))


def _groups(call: AttendCall) -> int:
    """Query heads that are multiplied with the same keys and the same values."""
    same = call.k_new.shape[1] == call.v_new.shape[1]
    return call.q.shape[1] // call.k_new.shape[1] if same else 1


def _rows(x: Tensor, call: AttendCall) -> Tensor:
    """``[B, H_q, S, ...]`` as ``[B, H, R, ...]``, where the R rows of a head are multiplied with the same keys."""
    return x.unflatten(1, (-1, _groups(call))).flatten(2, 3)


def _heads(call: AttendCall, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of some tokens, with as many heads as `_rows` has."""
    if call.latent:
        k, v = torch.cat([k, v], -1), k
    if k.shape[1] != v.shape[1]:
        k, v = (x.repeat_interleave(call.q.shape[1] // x.shape[1], 1) for x in (k, v))
    return k, v


def _bias(call: AttendCall, mask: Tensor | None) -> Tensor | None:
    """The columns ``mask`` of some tokens, as a bias of the scores of `_rows`. None if they hide nothing."""
    if mask is None or (mask.dtype == torch.bool and mask.all()):
        return None
    if mask.dtype == torch.bool:
        mask = mask.new_zeros((), dtype=call.q.dtype).masked_fill(~mask, -torch.inf)
    elif call.q.dtype == torch.float32:
        mask = mask.float()
    groups = _groups(call)
    if mask.shape[1] == 1:
        mask = mask.expand(-1, groups, -1, -1)
    return mask.unflatten(1, (-1, groups)).flatten(2, 3)
