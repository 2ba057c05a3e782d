"""Tensor subclasses among the inputs of a graph, such as weights quantized by torchao. The graph is turned into one of
the plain tensors they consist of, so that no other stage has to know about them.

Dynamo would check each of them in Python at every call: 20 us per weight. `unguarded` leaves these guards out, and
`Unwrapped` checks weights whose tensors have changed.
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
    """``inputs`` with tensor subclasses replaced by the plain tensors they consist of."""
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
    """Everything about ``value`` that a graph of its plain tensors depends on."""
    place = f"{value.dtype} {value.device} {value.shape} {value.stride()}"
    if not is_traceable_wrapper_subclass(value):
        return place
    names, context = value.__tensor_flatten__()
    inner = [_described(getattr(value, name)) for name in names]
    return f"{type(value)} {names} {context} {place} {inner}"


def unwrapped(gm: GraphModule) -> GraphModule:
    """The captured ``gm`` as a graph of its flattened inputs (`flatten`), which are put together before their first
    use."""
    graph = Graph()
    new: dict[Node, Node] = {}
    parts: dict[Node, tuple[Node, ...]] = {}
    made: dict[str, Callable] = {}  # one function for equal subclasses, so that layers stay alike
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
    """``run``, which takes the plain tensors of ``examples``, as a function of inputs like ``examples``. Raises
    `KVPassError` if a weight has become a different kind of tensor."""

    def __init__(self, run: Callable, examples: Sequence):
        self._run, self._attributes = run, [_attributes(value) for value in examples]
        self._weights = [isinstance(value, nn.Parameter) and has_subclass([value]) for value in examples]
        self._captured = self._descriptions(examples)
        self._seen = list(map(weakref.ref, flatten(compress(examples, self._weights))))  # tensors of the last call

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
    """The attributes of a tensor subclass that hold its tensors, and recursively theirs; None for a plain tensor."""
    if not is_traceable_wrapper_subclass(value):
        return None
    return [(name, _attributes(getattr(value, name))) for name in value.__tensor_flatten__()[0]]


def _parts(value, attributes: _Attributes) -> list[Tensor]:
    """`flatten` of one tensor subclass, by its known attributes."""
    parts: list[Tensor] = []
    for name, inner in attributes:
        part = getattr(value, name)
        if inner is None:
            parts.append(part)
        else:
            parts += _parts(part, inner)
    return parts


def unguarded(guards: Sequence) -> list[bool]:
    """A ``guard_filter_fn`` of torch.compile that drops guards on the contents of weights."""
    weights = {one.name for one in guards if one.guard_type == _METADATA and isinstance(one.value, nn.Parameter)}
    return [
        one.name.rpartition(".")[0] not in weights and not (one.guard_type == _METADATA and one.name in weights)
        for one in guards
    ]


def guards_of(model: nn.Module) -> dict:
    """Options of torch.compile for functions that run ``model``."""
    return {"guard_filter_fn": unguarded} if has_subclass(model.parameters()) else {}
