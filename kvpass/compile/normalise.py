"""Stage 1: turn a Dynamo graph into functional ATen with attention intact.

No other file touches AOTAutograd's private export; ``tests/test_private_apis.py`` explains what it relies on.
"""

from dataclasses import dataclass

import torch
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_any

from kvpass.lowering.session import compiling

from .evaluate import leaves, upstream
from .nodes import indices, outputs_of
from .vmaps import write_out

aten = torch.ops.aten
_CHECKS_BREAK = torch.__version__ < "2.13"  # generated C++ with an index check beside a comparison does not compile


@dataclass
class NormalGraph:
    """A functional graph in pre-dispatch ATen.

    module: its placeholders match ``inputs`` one to one; its outputs are the mutated inputs' new values, then the
        user's outputs.
    inputs: fake example values.
    written: the placeholders that the program writes, in the order of their new values.
    """

    module: GraphModule
    inputs: list
    written: list[Node]

    @property
    def graph(self) -> Graph:
        return self.module.graph

    @property
    def mutated(self) -> dict[Node, Node]:
        """Placeholder -> node with its new value, for every input that the program writes."""
        return dict(zip(self.written, outputs_of(self.graph), strict=False))

    @property
    def outputs(self) -> tuple:
        """The user's outputs, without the new values of mutated inputs."""
        return outputs_of(self.graph)[len(self.written) :]


@compiling()
def normalise(gm: GraphModule) -> NormalGraph:
    """Functionalize ``gm`` without decomposing attention; `in_place` is the way back."""
    write_out(gm)
    inputs = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(detect_fake_mode(inputs))), torch.no_grad():
        module, signature = aot_export_module(gm, inputs, trace_joint=False, pre_dispatch=True)
    if not isinstance(module, GraphModule):
        raise TypeError(f"AOTAutograd exported {module!r}, where a graph is expected.")
    placeholders = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    mutated = {str(value): placeholders[name] for value, name in signature.user_inputs_to_mutate.items()}
    written = [mutated[value.name] for value in outputs_of(module.graph)[: len(mutated)]]
    _clean(module.graph)
    return NormalGraph(module, inputs, written)


def _clean(graph: Graph) -> None:
    """Drop metadata asserts (they hide users), free ``view`` from the strides it was traced with, and leave out bounds
    checks of indices that come from lengths."""
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif _CHECKS_BREAK and node.target is aten.index.Tensor and _of_lengths(node):
            node.target = aten._unsafe_index.Tensor


def _of_lengths(index: Node) -> bool:
    """Whether an index is computed from lengths alone, as when a mask is built."""
    return not any(leaves(upstream(each)) for each in indices(index) if each is not None)


def in_place(normal: NormalGraph, skip: set[Node]) -> GraphModule:
    """Turn the functional graph into one with the program's own outputs, copying mutated inputs back at the end.

    skip: placeholders whose writes the caller has already put back.
    """
    graph, output = normal.graph, normal.graph.output_node()
    with graph.inserting_before(output):
        for placeholder, value in normal.mutated.items():
            if placeholder not in skip:
                graph.call_function(aten.copy_.default, (placeholder, value))
    output.args = (normal.outputs,)
    graph.eliminate_dead_code()  # safe here: in-place ops have mutable schemas, so they are impure
    graph.lint()
    return GraphModule(normal.module, graph)


def uses(node: Node, value: Node) -> bool:
    """Whether ``value`` is among the (nested) arguments of ``node``."""
    return tree_any(lambda argument: argument is value, (node.args, node.kwargs))
