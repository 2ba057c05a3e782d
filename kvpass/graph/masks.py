"""Masks that are pure structure: computed from lengths alone, and the same as no mask or as causality.

transformers builds a mask whenever it is traced, also where eager code would use none. Such a mask is *evaluated* at
several lengths, not guessed from how it is written; one that depends on any data stays.
"""

import torch
from torch.fx import Node

from .evaluate import at, constant, hints, is_size, leaves, run, symbols, upstream

_SHIFTS = (0, 1, 41)  # lengths tried: what was traced, and that much longer


def structure(mask: Node, queries, unpadded: bool = False) -> str | None:
    """What ``mask`` amounts to for ``queries`` (possibly symbolic) queries: "full" if each sees every key, "causal" if
    it is causality aligned to the last key, None if it depends on data or is anything else.

    unpadded: assume that padding masks among its inputs, ``[B, T]`` integers or booleans, hide nothing.
    """
    nodes = upstream(mask)
    constants = {node: value for node in leaves(nodes) if (value := constant(node)) is not None}
    data = [node for node in leaves(nodes) if node not in constants]
    if data and not (unpadded and all(map(_may_be_padding, data))):
        return None
    values = [*(node.meta.get("val") for node in nodes if is_size(node) or node in data), queries]
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]
    known, free = hints(values), set().union(*map(symbols, sizes))
    if not free <= set(known):
        return None
    verdicts = set()
    for shift in _SHIFTS:
        assignment = {symbol: known[symbol] + shift for symbol in free}
        results = constants | {node: _ones(node.meta["val"], assignment) for node in data}
        run(nodes, results, assignment)
        verdicts.add(_classify(results[mask], at(queries, assignment)))
    if verdicts <= {"full"}:
        return "full"
    return "causal" if verdicts <= {"full", "causal"} else None


def _may_be_padding(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim == 2 and not value.dtype.is_floating_point


def _ones(like: torch.Tensor, assignment) -> torch.Tensor:
    return torch.ones([at(size, assignment) for size in like.shape], dtype=like.dtype)


def _classify(mask: torch.Tensor, queries: int) -> str | None:
    if mask.dtype == torch.bool:
        allowed = mask
    else:
        allowed, banned = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
        if not (allowed | banned).all():
            return None
    if allowed.all():
        return "full"
    rows, keys = allowed.shape[-2:]
    causal = torch.ones(rows, keys, dtype=torch.bool).tril(keys - queries)
    return "causal" if rows == queries and (allowed == causal).all() else None
