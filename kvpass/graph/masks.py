"""Masks that are pure structure: computed from lengths alone, and the same as no mask or as causality.

transformers builds a mask whenever it is traced, also where eager code would use none. Such a mask is *evaluated* at
several lengths, not guessed from how it is written; one that depends on any data stays.
"""

import torch
from torch.fx import Node

from .evaluate import at, hints, is_size, run, symbols, upstream

_SHIFTS = (0, 1, 41)  # lengths tried: what was traced, and that much longer


def structure(mask: Node, queries) -> str | None:
    """What ``mask`` amounts to for ``queries`` (possibly symbolic) queries: "full" if each sees every key, "causal" if
    it is causality aligned to the last key, None if it depends on data or is anything else."""
    nodes = upstream(mask)
    if any(node.op != "call_function" and not is_size(node) for node in nodes):
        return None  # data among its inputs
    values = [*(node.meta.get("val") for node in nodes if is_size(node)), queries]
    known, free = hints(values), set().union(*map(symbols, values))
    if not free <= set(known):
        return None
    verdicts = set()
    for shift in _SHIFTS:
        assignment, results = {symbol: known[symbol] + shift for symbol in free}, {}
        run(nodes, results, assignment)
        verdicts.add(_classify(results[mask], at(queries, assignment)))
    if verdicts <= {"full"}:
        return "full"
    return "causal" if verdicts <= {"full", "causal"} else None


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
