"""Stage 3: writes become ``kvpass::append_`` at the end of the graph, and matched attention becomes
``kvpass::attend``."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..codec.spec import CodecSpec, parse
from ..errors import KVPassError, NotCapturedError
from ..layout.window import LENGTH_OFFSET, WINDOW_OFFSET
from .appends import Append, appends, hoist, placeholder
from .attention_site import AttentionSite, Source
from .calls import (
    APPEND_ROTARY,
    ATTEND,
    DEQUANTIZE,
    ROTATE,
    argument,
    call,
    change,
    compute,
    tensor_argument,
    tensors_argument,
)
from .combine import over_both, with_sinks
from .heads import select
from .masks import beside_padding, mark_padding, structure
from .nodes import shape, value_of
from .normalise import NormalGraph, in_place
from .pre_rope import Rotation, Rotations, insert_tables, turns_alike
from .report import listed
from .sinks import of_heads

aten = torch.ops.aten


def rewrite(normal: NormalGraph, inputs: Sequence, attentions: list[AttentionSite], refused: list[str]) -> GraphModule:
    """Rewrite ``normal`` in place and return it as a module with in-place state updates.

    inputs: the values it was captured with, fake or real.
    refused: why other attentions were not understood, for the error of a scheme that needs them.

    Raises `NotCapturedError` if the graph lacks what codecs are fitted to, or keys before rotary embedding.
    """
    graph = normal.graph
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        # another layer has just written these quantized values; this reads the pages before that write
        change(node, state=[placeholder(tensor) for tensor in tensors_argument(node, "state")])
    writes = appends(graph)
    readers = {site.key.ring: site for attention in attentions for site in attention.parts}  # each has its own ring
    _tap_queries(writes, readers, refused)
    with graph.inserting_before(graph.output_node()):
        tables = _store_turned_back(graph, inputs, writes)
    importance = _importance(writes, readers, refused)
    for attention in attentions:
        starts = [_simplify_mask(graph, site, evicts=site.key.ring in importance) for site in attention.parts]
        mass = _replace(graph, attention, importance.get(attention.key.ring), starts)
        for append in writes:
            if append.importance is not None and mass is not None and _has_a_say(append, attention):
                append.scores = [*(append.scores or []), mass]
    for append in writes:
        if append.q is not None or append.importance is not None:
            append.mask = readers[append.ring].mask
    _store_tables(graph, (one for one in tables if one["slots"] is None))  # first: appends may read them
    written = hoist(graph, writes)
    _store_tables(graph, (one for one in tables if one["slots"] is not None))  # last: appends choose which tokens stay
    written |= {one[name] for one in tables for name in ("cos", "sin")}
    made = in_place(normal, skip=written)
    _refuse_unfused_windows(made.graph, refused)
    return made


def _refuse_unfused_windows(graph: Graph, refused: list[str]) -> None:
    """Raise `NotCapturedError` if anything but ``kvpass::attend`` reads a layer with a sliding window. Such a read has
    tokens behind the window, which only ``attend`` hides, whatever mask the model computes."""
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        if parse(argument(node, "spec")).retention.span is None or not _stores(argument(node, "length")):
            continue
        if any(user.target is not ATTEND for user in node.users):
            raise NotCapturedError(
                f"attention over a sliding window was not recognized: {listed(refused) or 'other code reads the cache'}"
            )


def _stores(length: Node) -> bool:
    """Whether a cache of this length may hold tokens."""
    size = shape(length)[0]
    return not isinstance(size, int) or size > LENGTH_OFFSET + WINDOW_OFFSET


def _store_tables(graph: Graph, tables: Iterable[dict[str, Any]]) -> None:
    with graph.inserting_before(graph.output_node()):
        for one in tables:
            call(graph, APPEND_ROTARY, **one)


def _importance(writes: Iterable[Append], readers: dict[Node, AttentionSite], refused: list[str]) -> dict[Node, Node]:
    """For every cache that needs attention mass, the placeholder with the mass of its tokens, by the cache's ring."""
    evicting = [append for append in writes if append.codec.needs_importance]
    keys = [append for append in evicting if append.ring in readers]
    if 2 * len(keys) != len(evicting):
        raise NotCapturedError(f"one attention was not recognized: {listed(refused) or 'none reads the cache'}")
    found, shared = {}, None
    for append in keys:
        shared = append.importance or shared
        found[append.ring] = shared
    return found


def _has_a_say(append: Append, attention: AttentionSite) -> bool:
    """Whether the attention mass from ``attention`` counts for ``append``."""
    mine = append.ring is attention.key.ring
    return append.codec.statistic != "" and (append.codec.retention.shared or mine)


def _tap_queries(writes: Iterable[Append], readers: dict[Node, AttentionSite], refused: list[str]) -> None:
    """Pass the queries of the attention that reads a cache to codecs that are fitted to queries."""
    for append in writes:
        if not append.codec.quantizer.needs_queries:
            continue
        if append.ring not in readers:
            raise NotCapturedError(f"one attention was not recognized: {listed(refused) or 'none reads the cache'}")
        attention = readers[append.ring]
        append.q = attention.query
        if append.codec.quantizer.adaptive is not None:
            with attention.query.graph.inserting_before(attention.query.graph.output_node()):
                append.q = attention.query.graph.call_function(aten.mul.Tensor, (attention.query, attention.scale))
            append.q.meta["val"] = value_of(attention.query)


def _store_turned_back(graph: Graph, inputs: Sequence, writes: Iterable[Append]) -> list[dict[str, Any]]:
    """If a codec stores keys before rotary embedding, append those, and rotate keys when they are read. If it stores
    page-relative keys, say how they are rotated. Returns the arguments of the ops that store the call's tables, one for
    all layers that share them."""
    rotations = Rotations(graph, inputs)
    stored: dict[Node, tuple[Rotation, dict[str, Any]]] = {}
    for append in writes:
        if not append.codec.transform.turns:
            continue
        rotation = rotations.find(append.x)
        if rotation is None:
            continue  # a layer without positions
        decoded = [node for node in append.ring.users if node.target is DEQUANTIZE]
        if append.codec.transform.page_rope:
            reads, append.rope = decoded, rotation.rope
        else:
            reads = [user for node in decoded for user in node.users if user.target is ROTATE]
            _take_before_rotation(append, rotation, rotations)
        for node in reads:
            change(node, rope=rotation.rope)
        cos = tensor_argument(reads[0], "cos")
        if cos not in stored:
            of_call = dict(zip(("cos_new", "sin_new"), insert_tables(graph, rotation), strict=True))
            tables = dict(
                cos=cos, sin=tensor_argument(reads[0], "sin"), length=append.length, slots=append.slots, **of_call
            )
            stored[cos] = rotation, tables | {"spec": append.spec}
        elif not turns_alike(stored[cos][0], rotation):
            raise NotCapturedError("its layers use different rotary tables, but a cache stores only one")
    return [tables for _, tables in stored.values()]


def _take_before_rotation(append: Append, rotation: Rotation, rotations: Rotations) -> None:
    """Append the keys, and read the queries, from before ``rotation``."""
    append.x = rotation.before
    if append.q is not None:
        of_query = rotations.find(append.q)
        _check_turned_alike(of_query, rotation)
        append.q = of_query.before


def _check_turned_alike(query: Rotation | None, key: Rotation) -> None:
    if query is None or not turns_alike(query, key):
        raise NotCapturedError("queries are not rotated like keys")


def _simplify_mask(graph: Graph, attention: AttentionSite, evicts: bool) -> Node | None:
    """Drop the mask of ``attention`` if nothing but causality, a window or padding hides tokens. Returns the start of
    each row, if that replaces padding."""
    if attention.key.padded:  # keep only the columns for tokens
        with graph.inserting_before(attention.output):
            size = attention.key.insert_size(graph)
            attention.mask = compute(graph, aten.slice.Tensor, attention.mask, -1, 0, size)
    if attention.key.read("starts") is not None:
        mark_padding(graph, value_of(attention.query))
    _drop_structural_mask(attention)
    return None if evicts else _drop_padding(attention)


def _drop_structural_mask(attention: AttentionSite) -> None:
    if attention.mask is None:
        return
    span = None if attention.key.past is None else parse(attention.key.read("spec")).retention.span
    kind = structure(attention.mask, shape(attention.query)[2], span=span)
    if kind is not None and not (kind == "full" and attention.causal):
        attention.mask, attention.causal = None, kind == "causal"


def _drop_padding(attention: AttentionSite) -> Node | None:
    """The start of each row, if the cache knows it and the mask of ``attention`` hides nothing else."""
    starts = attention.key.read("starts")
    if starts is None or attention.mask is None or attention.key.needed_elsewhere or attention.value.needed_elsewhere:
        return None
    found = beside_padding(attention.mask, shape(attention.query)[2])
    if found is None or (found == "full" and attention.causal):
        return None
    attention.mask, attention.causal = None, found == "causal"
    return starts


def _replace(
    graph: Graph, attention: AttentionSite, importance: Node | None, starts: Sequence[Node | None]
) -> Node | None:
    """Put ``kvpass::attend`` in place of ``attention``, whose parts have these ``starts``. Returns the attention mass
    of each token, if the codec asks for it."""
    sinks = attention.sinks
    by_query = sinks is not None and not of_heads(sinks)
    with_lse = by_query or attention.second is not None
    if with_lse and importance is not None:
        raise NotCapturedError("attention mass is not available for sinks by query, nor for two caches in one softmax")
    sites = [replace(site, sinks=None) if by_query else site for site in attention.parts]
    first, *others = (
        _insert_attend(graph, site, importance, start, with_lse) for site, start in zip(sites, starts, strict=True)
    )
    with graph.inserting_before(attention.output):
        out, lse = first.out, first.lse
        for other in others:
            out, lse = over_both(graph, (out, lse), (other.out, other.lse))
        if by_query:
            out = with_sinks(graph, out, lse, sinks)
        attention.output.replace_all_uses_with(_shaped_as(graph, out, attention))
    return first.mass


class _Attended(NamedTuple):
    """What a call of ``kvpass::attend`` returns."""

    out: Node
    mass: Node | None
    lse: Node | None


def _insert_attend(
    graph: Graph, attention: AttentionSite, importance: Node | None, starts: Node | None, with_lse: bool
) -> _Attended:
    """A call of ``kvpass::attend`` for attention to one cache."""
    key, value = attention.key, attention.value
    codec, decoded = parse(key.read("spec")), key.needed_elsewhere or value.needed_elsewhere
    given = dict(mask=attention.mask, causal=attention.causal, scale=attention.scale, softcap=attention.softcap)
    with graph.inserting_before(attention.output):
        for name, side in ("key", key), ("value", value):
            given[name] = [_of_heads(graph, side.past, side)] if decoded else side.read("state")
    given |= dict(length=key.read("length"), k_spec=key.read("spec"), v_spec=value.read("spec"))
    turned = key.past if codec.transform.page_rope and not decoded else key.rotation
    if turned is not None:
        given |= {name: argument(turned, name) for name in ("cos", "sin", "rope")}
    if importance is not None:
        if codec.retention.evicts:
            _refuse_bias(attention)
        given |= dict(statistic=codec.statistic, importance=importance)
    if starts is not None:
        given["starts"] = starts
    if attention.expansion is not None:
        given["latent"] = True
    if with_lse:
        given["with_lse"] = True
    with graph.inserting_before(attention.output):
        if attention.sinks is not None:
            given["sinks"] = sinks = graph.call_function(torch.ops.aten.flatten.using_ints, (attention.sinks,))
            sinks.meta["val"] = value_of(attention.sinks).flatten()
        dtype = value_of(key.past).dtype
        presents = (_of_heads(graph, _present(graph, side), side) for side in (key, value))
        query, *new = (_cast(graph, x, dtype) for x in (attention.query, *presents))
        results = call(graph, ATTEND, q=query, k_new=new[0], v_new=new[1], **given)
        out = graph.call_function(operator.getitem, (results, 0))
        mass = graph.call_function(operator.getitem, (results, 1)) if given.get("statistic") else None
        lse = graph.call_function(operator.getitem, (results, 1)) if with_lse else None
        latent = attention.expansion is not None
        out.meta["val"] = value_of(query).new_empty((*shape(query)[:3], shape(key.past if latent else value.past)[3]))
        if lse is not None:
            lse.meta["val"] = value_of(query).new_empty(shape(query)[:3], dtype=torch.float32)
        if attention.expansion is not None:
            out = attention.expansion.expand(graph, out)
    return _Attended(out, mass, lse)


def _of_heads(graph: Graph, x: Node, side: Source) -> Node:
    """``x`` ``[B, H, T, D]`` with the heads of attention in place of those of the cache."""
    return select(graph, x, side.heads) if side.heads else x


def _cast(graph: Graph, x: Node, dtype: torch.dtype) -> Node:
    """``x`` in ``dtype``; under autocast, tensors that meet a cache may have another dtype."""
    if value_of(x).dtype == dtype:
        return x
    cast = graph.call_function(aten.to.dtype, (x, dtype))
    cast.meta["val"] = value_of(x).to(dtype)
    return cast


def _shaped_as(graph: Graph, new: Node, attention: AttentionSite) -> Node:
    """``new`` ``[B, H_q, S, D]`` in the dtype and shape of the output of ``attention``."""
    out = value_of(attention.output)
    new = _cast(graph, new, out.dtype)
    value = value_of(new)
    if out.ndim == 3:  # heads merged with the batch
        new = graph.call_function(aten.flatten.using_ints, (new, 0, 1))
        new.meta["val"] = value.flatten(0, 1)
    elif out.ndim == 5:  # a dim of its own for heads that share keys and values
        new = graph.call_function(aten.unflatten.int, (new, 1, list(out.shape[1:3])))
        new.meta["val"] = value.unflatten(1, out.shape[1:3])
    return new


def _present(graph: Graph, source: Source) -> Node:
    """The keys or values of the call; an empty tensor for cross-attention."""
    if source.present is not None:
        return source.present
    ring = source.ring
    empty = graph.call_function(aten.slice.Tensor, (ring, 2, 0, 0))
    empty.meta["val"] = value_of(ring)[:, :, :0]
    return empty


def _refuse_bias(attention: AttentionSite) -> None:
    if attention.mask is not None and structure(attention.mask, shape(attention.query)[2], True) is None:
        raise KVPassError(
            "The attention adds a position-dependent bias (ALiBi, a window, or a custom mask), but after eviction "
            "keys are no longer in order. Use the scheme without a budget."
        )


def simulate_attention(
    normal: NormalGraph, inputs: Sequence, attentions: list[AttentionSite], specs: list[tuple[str, str]], prompt: int
) -> GraphModule:
    """``normal`` with every attention replaced by `kvpass.runtime.simulated.simulate` under its specs."""
    graph, rotations = normal.graph, Rotations(normal.graph, inputs)
    for attention, pair in zip(attentions, specs, strict=True):
        _drop_structural_mask(attention)
        with graph.inserting_before(attention.output):
            before, rope = _before_rotation(graph, rotations, attention, parse(pair[0]))
            sinks = attention.sinks and graph.call_function(aten.flatten.using_ints, (attention.sinks,))
            new = call(
                graph, torch.ops.kvpass.simulate.default, q=attention.query, k=attention.key.present,
                v=attention.value.present, mask=attention.mask, scale=attention.scale, softcap=attention.softcap,
                sinks=sinks, before=before, rope=rope, k_spec=pair[0], v_spec=pair[1], prompt=prompt,
                k_shared=[], v_shared=[],
            )  # fmt: skip
            query = value_of(attention.query)
            new.meta["val"] = query.new_empty((*query.shape[:3], shape(attention.output)[-1]))
            attention.output.replace_all_uses_with(_shaped_as(graph, new, attention))
    return in_place(normal, skip=set())


def _before_rotation(
    graph: Graph, rotations: Rotations, attention: AttentionSite, spec: CodecSpec
) -> tuple[list[Node], str]:
    """Queries, keys, tables and kind of the rotary embedding for `kvpass.runtime.simulated.simulate`, if ``spec``
    stores keys before it and there is one."""
    rotation = rotations.find(attention.key.present) if spec.transform.turns else None
    if rotation is None:
        return [], ""
    query = rotations.find(attention.query)  # some schemes need it, and one graph serves all of them
    _check_turned_alike(query, rotation)
    return [query.before, rotation.before, *insert_tables(graph, rotation)], rotation.rope


def unfused(graph: Graph, attentions: list[AttentionSite], refused: list[str]) -> dict[int, str]:
    """Which packed layers keep their attention, counted in the order they are written, and why. For the graph before
    `rewrite`."""
    keys = appends(graph)[::2]  # keys come before values
    fused = {site.key.ring for attention in attentions for site in attention.parts}
    layers = [i for i, append in enumerate(keys) if append.ring not in fused]
    reasons = refused if len(refused) == len(layers) else [listed(refused)] * len(layers)
    return dict(zip(layers, reasons, strict=True))
