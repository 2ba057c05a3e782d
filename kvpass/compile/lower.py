"""Stage 4: every ``kvpass::*`` op of a graph gets the name of the implementation that will run it."""

from torch.fx import GraphModule, Node

from kvpass.lowering.table import Site, few, select

from .calls import arguments, change
from .concrete import at, hints

# whose device decides, and how many channels it has; an op that is not here has one implementation
_SERVED = {
    "encode": "x", "append_": "x", "append_layers_": "x", "decode": "ring", "attend": "q", "attend_decoded": "q",
    "attend_scored": "q",
}  # fmt: skip


def lower(gm: GraphModule, lowering: str) -> dict[str, str]:
    """Resolve the ``lowering`` argument of every op on its fake arguments; returns op -> implementation name.

    Attention of a number of queries that varies is resolved by each call; what is returned is who serves the one that
    is captured. Raises `KVPassError` if one has no implementation here.
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
        value = given[_SERVED[op]]
        value = (value if isinstance(value, Node) else value[0]).meta["val"]  # of many layers, any one
        queries = value.shape[2] if op.startswith("attend") else 0
        if op == "attend_scored" and len(given["key"]) == 1:  # the past is decoded already
            queries = 0
        specs = tuple(given[name] for name in ("k_spec", "v_spec", "spec") if name in given)
        of_call = few(at(queries, hints([queries])))
        chosen[op] = select(Site(op, value.device.type, specs, of_call, value.shape[-1]), lowering).name
        change(node, lowering=chosen[op] if isinstance(queries, int) else lowering)
    gm.recompile()
    return chosen
