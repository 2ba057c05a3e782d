"""Stage 3: writes become ``kvpass::append_`` at the end of the graph, matched attention becomes ``kvpass::attend``."""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from kvpass.lowering.append import MERGED

from ..codec.spec import CodecSpec, parse
from ..errors import KVPassError
from ..layout.eviction import statistic
from ..layout.window import LENGTH_OFFSET
from .find import Attention, Source
from .masks import structure
from .normalise import NormalGraph, in_place
from .own_cache import APPEND, DECODE, FUNCTIONALIZED, ROTATE
from .pre_rope import Rotation, Rotations, insert_tables, turns_alike
from .report import listed

aten = torch.ops.aten
APPEND_ROTARY = torch.ops.kvpass.append_rotary_.default
APPEND_LAYERS = torch.ops.kvpass.append_layers_.default
ATTEND = torch.ops.kvpass.attend.default
ATTEND_DECODED = torch.ops.kvpass.attend_decoded.default
ATTEND_SCORED = torch.ops.kvpass.attend_scored.default
# arguments of DECODE; codes may be another layer's, scales are its own
_SCALE, _RING, _LENGTH, _SPEC, _PREDICTOR = 1, 3, 4, 5, 9
_DEFAULTS = {a.name: a.default_value for a in APPEND._schema.arguments if a.has_default_value()}
_ARGUMENTS = [argument.name for argument in APPEND._schema.arguments]
_STATE = "codes", "scale", "zero_point", "ring"
_LOOKED_AT = set(_ARGUMENTS) - {*_STATE, "length", "x", "spec", "lowering"}
_WRITTEN = [a.name for a in APPEND._schema.arguments if a.alias_info and a.alias_info.is_write]


def rewrite(normal: NormalGraph, inputs: Sequence, attentions: list[Attention], refused: list[str]) -> GraphModule:
    """Rewrite ``normal`` in place and return it as a module with in-place state updates.

    inputs: the values it was captured with, fake or real.
    refused: why other attentions were not understood, for the error of a scheme that cannot do without them.
    """
    graph = normal.graph
    for node in graph.find_nodes(op="call_function", target=DECODE):
        # codes another layer has just written: what is read here are the pages before those
        node.args = (_placeholder(node.args[0]), *node.args[1:])
    appends = {node: arguments for node in graph.nodes if (arguments := _append_arguments(node)) is not None}
    taps = {attention.key.past.args[_SCALE]: attention for attention in attentions}
    _tap_queries(appends.values(), taps, refused)
    with graph.inserting_before(graph.output_node()):
        rotary = _store_before_rotation(graph, inputs, appends.values(), taps)
    importance = _importance(appends.values(), taps, refused)
    for attention in attentions:
        if attention.key.padded:
            _cut_mask(graph, attention)
        _drop_structural_mask(attention)
        paid = _replace(graph, attention, importance.get(attention.key.past.args[_SCALE]))
        for arguments in appends.values():
            if arguments["importance"] is not None and paid is not None and _has_a_say(arguments, attention):
                arguments["scores"] = [*(arguments["scores"] or []), paid]
    for arguments in appends.values():
        if arguments["q"] is not None or arguments["importance"] is not None:
            arguments["mask"] = taps[arguments["scale"]].mask
    written = _hoist_appends(normal, appends)
    if rotary is not None:
        with graph.inserting_before(graph.output_node()):
            graph.call_function(APPEND_ROTARY, rotary)
        written |= {*rotary[:2]}
    return in_place(normal, skip=written)


def _importance(appends: Iterable[dict], taps: dict[Node, Attention], refused: list[str]) -> dict[Node, Node]:
    """For every cache that asks for scores, by its scales, the placeholder that says what tokens are worth."""
    evicting = [a for a in appends if parse(a["spec"]).needs_importance]
    keys = [a for a in evicting if a["scale"] in taps]
    if 2 * len(keys) != len(evicting):
        raise KVPassError(
            "This scheme needs to know what attention each token was paid, and one attention was not understood: "
            f"{listed(refused) or 'none reads the cache'}. Use a scheme without that edge, as 'kivi'."
        )
    found, shared = {}, None
    for arguments in keys:
        shared = arguments["importance"] or shared
        found[arguments["scale"]] = shared
    return found


def _has_a_say(arguments: dict, attention: Attention) -> bool:
    """Whether what ``attention`` pays counts where ``arguments`` decide."""
    spec = parse(arguments["spec"])
    return statistic(spec) != "" and (spec.shared_eviction or arguments["scale"] is attention.key.past.args[_SCALE])


def _tap_queries(appends: Iterable[dict], taps: dict[Node, Attention], refused: list[str]) -> None:
    """Hand the queries of the attention that reads a cache to the codecs that are fitted to them."""
    for arguments in appends:
        if not parse(arguments["spec"]).needs_queries:
            continue
        if arguments["scale"] not in taps:
            raise KVPassError(
                "This scheme needs the queries of the attention that reads each K cache, and one attention was not "
                f"understood: {listed(refused) or 'none reads the cache'}. Use a scheme without "
                "that edge, such as 'kivi'."
            )
        attention = taps[arguments["scale"]]
        arguments["q"] = attention.query
        if parse(arguments["spec"]).adaptive is not None:
            with attention.query.graph.inserting_before(attention.query.graph.output_node()):
                scaled = attention.query.graph.call_function(aten.mul.Tensor, (attention.query, attention.scale))
            scaled.meta["val"] = attention.query.meta["val"]
            arguments["q"] = scaled


def _store_before_rotation(
    graph: Graph, inputs: Sequence, appends: Iterable[dict], taps: dict[Node, Attention]
) -> tuple | None:
    """Where a codec stores keys before rotary embedding: append those, and rotate what is read. Returns the arguments
    of the op that stores the tables of the call, once; None if no layer has any."""
    rotations, stored, call = Rotations(graph, inputs), None, None
    for arguments in appends:
        if not parse(arguments["spec"]).pre_rope:
            continue
        rotation = rotations.find(arguments["x"])
        if rotation is None:
            continue  # a layer without positions
        decoded = [node for node in arguments["scale"].users if node.target is DECODE]
        reads = [user for node in decoded for user in node.users if user.target is ROTATE]
        for node in reads:
            node.args = (*node.args[:3], rotation.rope)
        _, cos, sin, _ = reads[0].args
        arguments["x"] = rotation.before
        if arguments["q"] is not None:
            of_query = rotations.find(arguments["q"])
            _check_turned_alike(of_query, rotation)
            arguments["q"] = of_query.before
        if stored is None:
            stored = rotation
            call = (cos, sin, arguments["length"], *insert_tables(graph, rotation))
            call += (arguments["slots"], arguments["spec"]) if arguments["slots"] is not None else ()
        elif not turns_alike(stored, rotation):
            raise KVPassError(
                "Layers rotate their keys by different tables, and keys stored before rotary embedding share one: use "
                "the scheme with rope='post'."
            )
    return call


def _check_turned_alike(query: Rotation | None, key: Rotation) -> None:
    if query is None or not turns_alike(query, key):
        raise KVPassError("The queries are not rotated as the keys are: use the scheme with rope='post'.")


def _cut_mask(graph: Graph, attention: Attention) -> None:
    """Where keys had room behind them, keep the columns of the mask that are for tokens."""
    length, present, mask = attention.key.past.args[_LENGTH], attention.key.present, attention.mask
    with graph.inserting_before(attention.output):
        sizes = [graph.call_function(aten.sym_size.int, args) for args in ((length, 0), (present, 2))]
        total = graph.call_function(operator.add, tuple(sizes))
        total = graph.call_function(operator.sub, (total, LENGTH_OFFSET))
        cut = graph.call_function(aten.slice.Tensor, (mask, -1, 0, total))
    sizes[0].meta["val"], sizes[1].meta["val"] = length.meta["val"].shape[0], present.meta["val"].shape[2]
    total.args[0].meta["val"] = sizes[0].meta["val"] + sizes[1].meta["val"]
    total.meta["val"] = total.args[0].meta["val"] - LENGTH_OFFSET
    cut.meta["val"] = mask.meta["val"][..., : total.meta["val"]]
    attention.mask = cut


def _drop_structural_mask(attention: Attention) -> None:
    if attention.mask is None:
        return
    kind = structure(attention.mask, attention.query.meta["val"].shape[2])
    if kind is not None and not (kind == "full" and attention.causal):
        attention.mask, attention.causal = None, kind == "causal"


def _replace(graph: Graph, attention: Attention, importance: Node | None) -> Node | None:
    """Put a ``kvpass`` op in the place of ``attention``. With ``importance``, returns what attention it paid to each
    token."""
    key, value = attention.key, attention.value
    *_, k_spec = key.past.args[: _SPEC + 1]
    if importance is not None and parse(k_spec).budget is not None:
        _refuse_bias(attention)
    if key.needed_elsewhere or value.needed_elsewhere:
        target, past = ATTEND_DECODED, (key.past, value.past)
    else:
        *k_state, length, _ = key.past.args[:6]
        *v_state, _, v_spec = value.past.args[:6]
        target, past = ATTEND, (*k_state, *v_state, length)
    how = attention.mask, attention.causal, attention.scale, attention.softcap
    specs = (k_spec, v_spec) if target is ATTEND else ()
    options = {}
    if key.rotation is not None:
        options = dict(zip(("cos", "sin", "rope"), key.rotation.args[1:], strict=True))
    if target is ATTEND and parse(k_spec).predictor:
        (options["center"],) = key.past.args[_PREDICTOR]
    if importance is not None:
        keys, values = ([past[0]], [past[1]]) if target is ATTEND_DECODED else (past[:4], past[4:8])
        past, specs = (keys, values, key.past.args[_LENGTH]), (k_spec, value.past.args[_SPEC])
        target, specs = ATTEND_SCORED, (*specs, statistic(parse(k_spec)), importance)
    with graph.inserting_before(attention.output):
        if attention.sinks is not None:
            options["sinks"] = graph.call_function(torch.ops.aten.flatten.using_ints, (attention.sinks,))
            options["sinks"].meta["val"] = attention.sinks.meta["val"].flatten()
        dtype = attention.key.past.meta["val"].dtype
        query, *new = (_cast(graph, x, dtype) for x in (attention.query, *(_present(graph, s) for s in (key, value))))
        new = graph.call_function(target, (query, *past, *new, *how, *specs), options)
        paid, result = None, new
        if importance is not None:
            result, paid = (graph.call_function(operator.getitem, (new, i)) for i in range(2))
        attention.output.replace_all_uses_with(_shaped_as(graph, result, query, attention))
    return paid


def _cast(graph: Graph, x: Node, dtype: torch.dtype) -> Node:
    """``x`` in ``dtype``: under autocast what meets a cache is not all of the cache's."""
    if x.meta["val"].dtype == dtype:
        return x
    cast = graph.call_function(aten.to.dtype, (x, dtype))
    cast.meta["val"] = x.meta["val"].to(dtype)
    return cast


def _shaped_as(graph: Graph, new: Node, query: Node, attention: Attention) -> Node:
    """``new`` ``[B, H_q, S, D]``, of ``query``, in the dtype and shape of the output of ``attention``."""
    q, out = query.meta["val"], attention.output.meta["val"]
    new.meta["val"] = q.new_empty((*q.shape[:3], out.shape[-1]))
    new = _cast(graph, new, out.dtype)
    value = new.meta["val"]
    if out.ndim == 3:  # heads merged with the batch
        new = graph.call_function(aten.flatten.using_ints, (new, 0, 1))
        new.meta["val"] = value.flatten(0, 1)
    elif out.ndim == 5:  # heads that share keys and values in a dim of their own
        new = graph.call_function(aten.unflatten.int, (new, 1, list(out.shape[1:3])))
        new.meta["val"] = value.unflatten(1, out.shape[1:3])
    return new


def _present(graph: Graph, source: Source) -> Node:
    """The keys or values of the call; an empty tensor for cross-attention."""
    if source.present is not None:
        return source.present
    ring = source.past.args[_RING]
    empty = graph.call_function(aten.slice.Tensor, (ring, 2, 0, 0))
    empty.meta["val"] = ring.meta["val"][:, :, :0]
    return empty


def _refuse_bias(attention: Attention) -> None:
    if attention.mask is not None and structure(attention.mask, attention.query.meta["val"].shape[2], True) is None:
        raise KVPassError(
            "The attention adds a bias that depends on which key is which (ALiBi, a window, or a mask of your own), "
            "and after evicting tokens keys are no longer in order. Use the scheme without a budget."
        )


def _is_append(node: Node) -> bool:
    return node.target is FUNCTIONALIZED and node.args[0] is APPEND


def _placeholder(base: Node) -> Node:
    """The input of the graph behind ``base``: codes that layers share are written by one append after another."""
    while base.target is operator.getitem and _is_append(base.args[0]):
        base = base.args[0].kwargs["_all_bases"][base.args[1] - 1]
    return base


def _append_arguments(node: Node) -> dict | None:
    """The arguments of a functionalized ``append_``, in terms of the tensors it would have written."""
    if not _is_append(node):
        return None
    bases, arguments = node.kwargs["_all_bases"], {}
    for name in _ARGUMENTS:
        if name in _WRITTEN:
            index = node.kwargs[f"_{name}_base_index"]
            arguments[name] = None if index is None else _placeholder(bases[index])
        else:
            value = node.kwargs.get(name, _DEFAULTS.get(name))
            arguments[name] = _placeholder(value) if isinstance(value, Node) else value
    return arguments


def _hoist_appends(normal: NormalGraph, appends: dict[Node, dict]) -> set[Node]:
    """Put every ``append_`` back in place, at the end of the graph and in layer order, those that depend on nothing but
    their tokens as one call for all layers.

    Reads then never follow a write, so nothing has to be cloned. Returns the placeholders written.
    """
    graph, output, written = normal.graph, normal.graph.output_node(), set()
    codes = Counter(arguments["codes"] for arguments in appends.values())
    alike: dict[tuple, list[dict]] = {}
    for node, arguments in appends.items():
        for item in node.users:
            if any(user is not output and not _is_append(user) for user in item.users):
                raise KVPassError("A packed cache is read again after it was written in the same call; not supported.")
        alone = codes[arguments["codes"]] == 1 and not any(arguments[name] for name in _LOOKED_AT)
        if alone and parse(arguments["spec"]).features <= MERGED:
            place = arguments["length"], arguments["x"].meta["val"].device
            alike.setdefault((*place, arguments["spec"], arguments["lowering"]), []).append(arguments)
            continue
        with graph.inserting_before(output):
            graph.call_function(APPEND, tuple(arguments[name] for name in _ARGUMENTS))
    for (length, _, spec, lowering), layers in alike.items():
        *state, x = ([arguments[name] for arguments in layers] for name in (*_STATE, "x"))
        with graph.inserting_before(output):
            graph.call_function(APPEND_LAYERS, (*state, length, x, spec, lowering))
    for arguments in appends.values():
        written.update(arguments[name] for name in _WRITTEN if arguments[name] is not None)
    return written


def simulate_attention(
    normal: NormalGraph, inputs: Sequence, attentions: list[Attention], specs: list[tuple[str, str]], prompt: int
) -> GraphModule:
    """``normal`` with every attention replaced by `kvpass.runtime.simulated.simulate` under its specs."""
    graph, rotations = normal.graph, Rotations(normal.graph, inputs)
    for attention, pair in zip(attentions, specs, strict=True):
        _drop_structural_mask(attention)
        with graph.inserting_before(attention.output):
            before = _before_rotation(graph, rotations, attention, parse(pair[0]))
            sinks = attention.sinks and graph.call_function(aten.flatten.using_ints, (attention.sinks,))
            present = attention.key.present, attention.value.present
            how = attention.mask, attention.scale, attention.softcap, sinks
            new = graph.call_function(
                torch.ops.kvpass.simulate.default, (attention.query, *present, *how, *before, *pair, prompt)
            )
            new.meta["val"] = attention.output.meta["val"]
            attention.output.replace_all_uses_with(_shaped_as(graph, new, attention.query, attention))
    return in_place(normal, skip=set())


def _before_rotation(
    graph: Graph, rotations: Rotations, attention: Attention, spec: CodecSpec
) -> tuple[list[Node], str]:
    """Queries, keys, tables and kind of the rotary embedding as `kvpass.runtime.simulated.simulate` takes them, if
    ``spec`` stores keys before it and they have one."""
    rotation = rotations.find(attention.key.present) if spec.pre_rope else None
    if rotation is None:
        return [], ""
    query = rotations.find(attention.query)  # for the schemes that need it: a graph serves them all
    _check_turned_alike(query, rotation)
    return [query.before, rotation.before, *insert_tables(graph, rotation)], rotation.rope


def unfused(graph: Graph, attentions: list[Attention], refused: list[str]) -> dict[int, str]:
    """Which of the packed layers, counted in the order they are written, keep their attention, and why. For the graph
    before `rewrite`."""
    scales = [arguments["scale"] for node in graph.nodes if (arguments := _append_arguments(node)) is not None]
    fused = {attention.key.past.args[_SCALE] for attention in attentions}
    layers = [i for i, scale in enumerate(scales[::2]) if scale not in fused]  # keys come before values
    reasons = refused if len(refused) == len(layers) else [listed(refused)] * len(layers)
    return dict(zip(layers, reasons, strict=True))


def count(gm: GraphModule) -> dict[str, int]:
    """What a rewritten graph reads its caches by; see `GraphReport`."""
    nodes = list(gm.graph.nodes)
    scored = [node for node in nodes if node.target is ATTEND_SCORED]
    reconstructed = sum(node.target is ATTEND_DECODED for node in nodes) + sum(len(n.args[1]) == 1 for n in scored)
    decodes = sum(node.target is DECODE for node in nodes)
    rotated = sum(
        node.target in (ATTEND, ATTEND_DECODED, ATTEND_SCORED) and bool(node.kwargs.get("rope")) for node in nodes
    )
    rotated += sum(node.target is ROTATE and bool(node.args[3]) for node in nodes)
    return dict(reconstructed=reconstructed, decoded=decodes - 2 * reconstructed, rotated=rotated)
