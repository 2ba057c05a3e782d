"""Expand ``torch.vmap`` in a captured graph into plain ATen, because AOTAutograd's pre-dispatch export cannot trace it.
transformers uses it in mask functions. No other file knows how Dynamo represents it; see
``tests/test_private_apis.py``."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch._functorch.predispatch import _vmap_decrement_nesting, _vmap_increment_nesting
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .nodes import outputs_of


def write_out(gm: GraphModule) -> None:
    """Replace each ``vmap`` of ``gm`` by equivalent ops."""
    regions = list(_regions(gm.graph))
    for nodes in regions:
        _replace(gm, nodes)
    if regions:
        gm.graph.lint()
        gm.recompile()


def _regions(graph: Graph) -> Iterator[list[Node]]:
    """The nodes of each outermost ``vmap``, from where it begins to where it ends."""
    depth, region = 0, list[Node]()
    for node in list(graph.nodes):
        depth += node.target is _vmap_increment_nesting
        if depth:
            region.append(node)
        if node.target is _vmap_decrement_nesting:
            depth -= 1
            if not depth:
                yield region
                region = []


def _replace(gm: GraphModule, nodes: Sequence[Node]) -> None:
    inside = set(nodes)
    inputs = list(dict.fromkeys(leaf for node in nodes for leaf in node.all_input_nodes if leaf not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    written = _traced(gm, nodes, inputs, outputs)
    new = dict(zip(written.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with gm.graph.inserting_before(nodes[0]):
        for node in written.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            new[node] = gm.graph.node_copy(node, new.__getitem__)
            new[node].meta["example_value"] = node.meta.get("val")
            if node.op == "get_attr":
                new[node].target = _kept(gm, getattr(written, node.target))
    for output, result in zip(outputs, outputs_of(written.graph), strict=True):
        output.replace_all_uses_with(new[result])
    for node in reversed(nodes):
        gm.graph.erase_node(node)


def _traced(gm: GraphModule, nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """``nodes`` as ATen ops of ``inputs``, in a separate graph."""
    graph, new = Graph(), {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output([new[node] for node in outputs])
    of_inputs = (node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder"))
    modes = (value.fake_mode for value in of_inputs if isinstance(value, FakeTensor))
    with torch.no_grad(), next(modes, nullcontext()):
        return make_fx(GraphModule(gm, graph))(*map(_example, inputs))


def _example(node: Node) -> object:
    """The example value of ``node`` in the active fake mode; values within a graph belong to another one."""
    value = node.meta["example_value"]
    if node.op == "placeholder" or not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _kept(gm: GraphModule, value: object) -> str:
    """Store ``value`` in ``gm``, and return its attribute name."""
    name = f"_of_vmap_{sum(key.startswith('_of_vmap_') for key in vars(gm))}"
    setattr(gm, name, value)
    return name
