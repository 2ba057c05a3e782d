"""Tensor subclasses among the inputs of a graph, as weights quantized by torchao are. It is made a graph of the plain
tensors they consist of, so that no other stage knows of them.

Dynamo would look into each of them at every call, in Python: 20 us for a weight. `unguarded` leaves that out, and
`Unwrapped` does it where a weight has become another.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import KVPassError

_METADATA = "TENSOR_SUBCLASS_METADATA_MATCH"


def has_subclass(inputs: Iterable) -> bool:
    """Whether there are tensor subclasses among ``inputs``."""
    return any(map(is_traceable_wrapper_subclass, inputs))


def flatten(inputs: Iterable) -> list:
    """``inputs``, tensor subclasses replaced by the plain tensors they consist of."""
    flat = []
    for value in inputs:
        if is_traceable_wrapper_subclass(value):
            flat += flatten(getattr(value, name) for name in value.__tensor_flatten__()[0])
        else:
            flat.append(value)
    return flat


def _unflatten(like, flat: Iterator):
    """The inverse of `flatten` for one input."""
    if not is_traceable_wrapper_subclass(like):
        return next(flat)
    names, context = like.__tensor_flatten__()
    inner = {name: _unflatten(getattr(like, name), flat) for name in names}
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())


def _described(value: Tensor) -> str:
    """All that a graph of the plain tensors in ``value`` goes by."""
    place = f"{value.dtype} {value.device} {value.shape} {value.stride()}"
    if not is_traceable_wrapper_subclass(value):
        return place
    names, context = value.__tensor_flatten__()
    inner = [_described(getattr(value, name)) for name in names]
    return f"{type(value)} {names} {context} {place} {inner}"


def unwrapped(gm: GraphModule) -> GraphModule:
    """The captured ``gm`` as a graph of its inputs `flatten`ed, each of which is put together before its first use."""
    graph = Graph()
    new: dict[Node, Node] = {}
    parts: dict[Node, tuple[Node, ...]] = {}
    made: dict[str, Callable] = {}  # equal calls, so that layers are alike
    for node in gm.graph.nodes:
        if node.op == "placeholder" and is_traceable_wrapper_subclass(node.meta["example_value"]):
            plain = flatten([node.meta["example_value"]])
            parts[node] = tuple(_placeholder(graph, f"{node.name}_{i}", value) for i, value in enumerate(plain))
            continue
        for leaf in node.all_input_nodes:
            if leaf in parts and leaf not in new:
                value = leaf.meta["example_value"]
                put_together = made.setdefault(_described(value), _putting_together(value))
                new[leaf] = graph.call_function(put_together, parts[leaf])
                new[leaf].meta = dict(leaf.meta)
        new[node] = graph.node_copy(node, new.__getitem__)
    return GraphModule(gm, graph)


def _placeholder(graph: Graph, name: str, value) -> Node:
    node = graph.placeholder(name)
    node.meta["example_value"] = value
    return node


def _putting_together(like) -> Callable:
    def put_together(*flat):
        return _unflatten(like, iter(flat))

    return put_together


class Unwrapped:
    """``run``, which takes the plain tensors that ``examples`` consist of, as a function of inputs like these. Raises
    `KVPassError` where a weight among them has become one of another kind.
    """

    def __init__(self, run: Callable, examples: Sequence):
        self._run, self._attributes = run, [_attributes(value) for value in examples]
        self._weights = [isinstance(value, nn.Parameter) and has_subclass([value]) for value in examples]
        self._captured = self._descriptions(examples)
        self._seen = list(map(weakref.ref, flatten(compress(examples, self._weights))))  # parts, as of the last call

    def _descriptions(self, inputs: Sequence) -> list[str]:
        return [_described(weight) for weight in compress(inputs, self._weights)]

    def __call__(self, *inputs):
        flat: list = []
        weights: list[Tensor] = []
        for value, attributes, is_weight in zip(inputs, self._attributes, self._weights, strict=True):
            if attributes is None:
                flat.append(value)
                continue
            parts = _parts(value, attributes)
            flat += parts
            if is_weight:
                weights += parts
        if any(ref() is not part for ref, part in zip(self._seen, weights, strict=True)):
            self._look_into(inputs)
            self._seen = list(map(weakref.ref, weights))
        return self._run(*flat)

    def _look_into(self, inputs: Sequence) -> None:
        if self._descriptions(inputs) != self._captured:
            raise KVPassError(
                "The quantization of the weights changed after a step was captured: call kvpass.remove(model), then "
                "apply again."
            )


_Attributes = list[tuple[str, "_Attributes | None"]]


def _attributes(value) -> _Attributes | None:
    """The attributes of a tensor subclass that hold its tensors, and the attributes of these; None if it is none."""
    if not is_traceable_wrapper_subclass(value):
        return None
    return [(name, _attributes(getattr(value, name))) for name in value.__tensor_flatten__()[0]]


def _parts(value, attributes: _Attributes) -> list[Tensor]:
    """`flatten` of one tensor subclass, without asking it again."""
    parts: list[Tensor] = []
    for name, inner in attributes:
        part = getattr(value, name)
        if inner is None:
            parts.append(part)
        else:
            parts += _parts(part, inner)
    return parts


def unguarded(guards: Sequence) -> list[bool]:
    """A ``guard_filter_fn`` of torch.compile: without those that look into weights."""
    weights = {one.name for one in guards if one.guard_type == _METADATA and isinstance(one.value, nn.Parameter)}
    return [
        one.name.rpartition(".")[0] not in weights and not (one.guard_type == _METADATA and one.name in weights)
        for one in guards
    ]


def guards_of(model: nn.Module) -> dict:
    """Options of torch.compile for what runs ``model``."""
    return {"guard_filter_fn": unguarded} if has_subclass(model.parameters()) else {}
