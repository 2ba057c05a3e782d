"""Stage 3: writes become ``kvpass::append_`` at the end of the graph, matched attention becomes ``kvpass::attend``."""

import torch
from torch.fx import Graph, GraphModule, Node

from ..codec.spec import parse
from ..errors import KVPassError
from .find import DECODE, Attention
from .masks import structure
from .normalise import NormalGraph, in_place

APPEND = torch.ops.kvpass.append_.default
ATTEND = torch.ops.kvpass.attend.default
_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
_ARGUMENTS = [argument.name for argument in APPEND._schema.arguments]
_WRITTEN = [a.name for a in APPEND._schema.arguments if a.alias_info and a.alias_info.is_write]


def rewrite(normal: NormalGraph, attentions: list[Attention], refused: list[str]) -> GraphModule:
    """Rewrite ``normal`` in place and return it as a module with in-place state updates.

    refused: why other attentions were not understood, for the error of a scheme that cannot do without them.
    """
    graph = normal.graph
    taps = {}
    for attention in attentions:
        _drop_structural_mask(attention)
        _replace(graph, attention)
        taps[attention.key.past.args[0]] = attention
    written = _hoist_appends(normal, taps, refused)
    return in_place(normal, skip=written)


def _drop_structural_mask(attention: Attention) -> None:
    if attention.mask is None:
        return
    kind = structure(attention.mask, attention.query.meta["val"].shape[2])
    if kind is not None and not (kind == "full" and attention.causal):
        attention.mask, attention.causal = None, kind == "causal"


def _replace(graph: Graph, attention: Attention) -> None:
    key, value = attention.key, attention.value
    *k_state, length, k_spec = key.past.args[:6]
    *v_state, _, v_spec = value.past.args[:6]
    with graph.inserting_before(attention.output):
        new = graph.call_function(
            ATTEND,
            (
                attention.query, *k_state, *v_state, length, key.present, value.present, attention.mask,
                attention.causal, attention.scale, attention.softcap, k_spec, v_spec,
            ),
        )  # fmt: skip
        new.meta["val"] = attention.output.meta["val"].new_empty(attention.output.meta["val"].shape)
        result = new
        if new.meta["val"].dtype != attention.query.meta["val"].dtype:
            result = graph.call_function(torch.ops.aten.to.dtype, (new, new.meta["val"].dtype))
            result.meta["val"] = new.meta["val"]
    attention.output.replace_all_uses_with(result)


def _append_arguments(node: Node) -> dict | None:
    """The arguments of a functionalized ``append_``, in terms of the tensors it would have written."""
    if node.target is not _FUNCTIONALIZED or node.args[0] is not APPEND:
        return None
    bases, arguments = node.kwargs["_all_bases"], {}
    for name in _ARGUMENTS:
        if name in _WRITTEN:
            index = node.kwargs[f"_{name}_base_index"]
            arguments[name] = None if index is None else bases[index]
        else:
            arguments[name] = node.kwargs.get(name, "auto" if name == "lowering" else None)
    return arguments


def _hoist_appends(normal: NormalGraph, taps: dict[Node, Attention], refused: list[str]) -> set[Node]:
    """Put every ``append_`` back in place, at the end of the graph and in layer order.

    Reads then never follow a write, so nothing has to be cloned. Returns the placeholders written.
    """
    graph, output, written = normal.graph, normal.graph.output_node(), set()
    new_values = set(normal.mutated.values())
    for node in list(graph.nodes):
        arguments = _append_arguments(node)
        if arguments is None:
            continue
        for item in node.users:
            if any(user is not output for user in item.users) or (item.users and item not in new_values):
                raise KVPassError("A packed cache is read again after it was written in the same call; not supported.")
        attention = taps.get(arguments["codes"])
        if parse(arguments["spec"]).subspace is not None:
            if attention is None:
                raise KVPassError(
                    "This scheme needs the queries of the attention that reads each K cache, and one attention was not "
                    f"understood: {'; '.join(dict.fromkeys(refused)) or 'none reads the cache'}. Use a scheme without "
                    "that edge, such as 'kivi'."
                )
            arguments.update(q=attention.query, mask=attention.mask)
        with graph.inserting_before(output):
            graph.call_function(APPEND, tuple(arguments[name] for name in _ARGUMENTS))
        written.update(arguments[name] for name in _WRITTEN if arguments[name] is not None)
    return written


def unfused_reads(gm: GraphModule) -> int:
    """Decodes left in a rewritten graph: cache reads that no attention took over."""
    return sum(node.target is DECODE for node in gm.graph.nodes)
