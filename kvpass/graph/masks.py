"""Masks that are pure structure: computed from lengths alone, and the same as no mask or as causality.

transformers builds a mask whenever it is traced, also where eager code would use none. Such a mask is *evaluated* at
several lengths, not guessed from how it is written; one that depends on any data stays.
"""

import sympy
import torch
from torch.fx import Node

_SHIFTS = (0, 1, 41)  # lengths tried: what was traced, and that much longer


def structure(mask: Node, queries) -> str | None:
    """What ``mask`` amounts to for ``queries`` (possibly symbolic) queries: "full" if each sees every key, "causal" if
    it is causality aligned to the last key, None if it depends on data or is anything else."""
    nodes = _upstream(mask)
    if nodes is None:
        return None
    symbols = sorted(
        {s for node in nodes for s in _symbols(node.meta.get("val"))} | _symbols(queries), key=lambda s: s.name
    )
    hints = _hints(nodes, queries)
    if any(symbol not in hints for symbol in symbols):
        return None
    verdicts = set()
    for shift in _SHIFTS:
        at = {symbol: hints[symbol] + shift for symbol in symbols}
        verdicts.add(_classify(_evaluate(nodes, mask, at), _at(queries, at)))
    if verdicts <= {"full"}:
        return "full"
    return "causal" if verdicts <= {"full", "causal"} else None


def _upstream(mask: Node) -> list[Node] | None:
    """The nodes that compute ``mask`` in order, or None if a data tensor is among its inputs."""
    needed, stack = set(), [mask]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        if _is_size(node):
            continue  # its value is known from the symbols; what it is the size of does not matter
        if node.op != "call_function":
            return None
        stack.extend(node.all_input_nodes)
    return [node for node in mask.graph.nodes if node in needed]


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, int))


def _symbols(value) -> set[sympy.Symbol]:
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()


def _hints(nodes: list[Node], queries) -> dict[sympy.Symbol, int]:
    hints = {}
    for value in [*(node.meta.get("val") for node in nodes), queries]:
        if isinstance(value, torch.SymInt):
            shape_env = value.node.shape_env
            known = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
            hints.update({symbol: int(known[symbol]) for symbol in _symbols(value) if symbol in known})
    return hints


def _at(value, assignment: dict[sympy.Symbol, int]):
    return int(value.node.expr.xreplace(assignment)) if isinstance(value, torch.SymInt) else value


def _evaluate(nodes: list[Node], mask: Node, assignment: dict) -> torch.Tensor:
    values = {}

    def concrete(argument):
        return values[argument] if isinstance(argument, Node) else _at(argument, assignment)

    for node in nodes:
        if _is_size(node):
            values[node] = _at(node.meta["val"], assignment)
        else:
            args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), concrete)
            kwargs = {k: ("cpu" if k == "device" else v) for k, v in kwargs.items()}
            values[node] = node.target(*args, **kwargs)
    return values[mask]


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
