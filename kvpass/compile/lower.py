"""Stage 4: give every ``kvpass::*`` op of a graph the name of the implementation that will run it."""

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from kvpass.lowering.table import AUTO, DispatchKey, attention_key, extras, few, select
from kvpass.lowering.window_mask import window_as

from ..codec.spec import parse
from .appends import tensor_of
from .calls import arguments, change
from .evaluate import at, hints
from .nodes import value_of

# op -> argument whose device and head_dim decide; ops that are not listed have a single implementation
_SERVED = {"quantize": "x", "append_": "x", "append_layers_": "x", "dequantize": "state", "attend": "q"}


def lower(gm: GraphModule, lowering: str) -> dict[str, str]:
    """Resolve the ``lowering`` argument of every op from its fake arguments; returns op -> implementation name.

    Attention with a varying number of queries is resolved in each call; the result then names the implementation for
    the captured one. Raises `KVPassError` if an op has no implementation here.
    """
    chosen = {}
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.name.startswith("kvpass::"):
            continue
        op = schema.name.removeprefix("kvpass::")
        if op not in _SERVED:
            continue
        given = arguments(node)
        specs = tuple(given[name] for name in ("k_spec", "v_spec", "spec") if name in given)
        value = given[_SERVED[op]]
        if op == "dequantize":
            value = tensor_of(value, parse(given["spec"]), "ring")
        value = value_of(value if isinstance(value, Node) else value[0])  # of several layers, any will do
        queries, named, label = value.shape[2] if op == "attend" else 0, lowering, op
        if op == "attend" and len(given["key"]) == 1:
            specs, named, label = (), AUTO, "attend (decoded)"
        of_call = at(queries, hints([queries]))
        if op == "attend":
            dispatch = _of_attention(given, value, specs, of_call)
        else:
            dispatch = DispatchKey(op, value.device.type, specs, few(of_call), value.shape[-1])
        chosen[label] = select(dispatch, named).name
        change(node, lowering=chosen[label] if isinstance(queries, int) else named)
    gm.recompile()
    return chosen


def _of_attention(given: dict[str, Any], q: Tensor, specs: tuple[str, ...], queries: int) -> DispatchKey:
    """The dispatch key of attention with the arguments ``given``, for ``queries`` query tokens."""
    key = given["key"] if len(given["key"]) == 1 else [tensor_of(given["key"], parse(given["k_spec"]), "ring")]
    ring, new, beside = value_of(key[0]), value_of(given["k_new"]), value_of(given["v_new"])
    rotary = given["rope"] and not parse(given["k_spec"]).transform.page_rope
    mask, starts = given["mask"], given["starts"]
    if parse(given["k_spec"]).retention.span is not None:
        specs = tuple(str(parse(spec).unbounded) for spec in specs)
        if mask is None:
            mask, starts = (window_as(q.device.type, queries) == name or None for name in ("mask", "starts"))
    sinks, softcap, statistic = (given[name] for name in ("sinks", "softcap", "statistic"))
    asked = extras(mask, starts, rotary, sinks, softcap, statistic, new, beside, given["latent"], given["with_lse"])
    return attention_key(q, ring, specs, queries, asked)
