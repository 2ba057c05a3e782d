"""Stage 4: every ``kvpass::*`` op of a graph gets the name of the implementation that will run it."""

from torch.fx import GraphModule, Node

from kvpass.lowering.table import Site, few, select

from .concrete import at, hints

# argument whose device decides; an op that is not here has one implementation
_DEVICE_OF = {
    "encode": 0, "append_": 3, "append_layers_": 3, "decode": 3, "attend": 0, "attend_decoded": 0, "attend_scored": 0,
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
        if op not in _DEVICE_OF:
            continue
        value = node.args[_DEVICE_OF[op]]
        value = (value if isinstance(value, Node) else value[0]).meta["val"]  # of many layers, any one
        queries = value.shape[2] if op.startswith("attend") else 0
        if op == "attend_scored" and len(node.args[1]) == 1:  # the past is decoded already
            queries = 0
        names = [argument.name for argument in schema.arguments]
        specs = tuple(argument for name, argument in zip(names, node.args, strict=False) if name.endswith("spec"))
        of_call = few(at(queries, hints([queries])))
        chosen[op] = select(Site(op, value.device.type, specs, of_call, value.shape[-1]), lowering).name
        position = names.index("lowering")
        name = chosen[op] if isinstance(queries, int) else lowering
        node.args = (*node.args[:position], name, *node.args[position + 1 :])
    gm.recompile()
    return chosen
