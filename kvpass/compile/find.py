"""Stage 2: find attention over a packed cache.

Attention is ``scaled_dot_product_attention``, or a softmax between two matrix products. Its keys and values are traced
back through views and head repetition to ``cat([kvpass.dequantize(state), present])``, or two of these in a row, or are
shown to equal that by running the nodes in between (`kvpass.compile.own_cache`), or to be expanded from a cached latent
(`kvpass.compile.latent`). Attention that is not understood is refused with a reason and keeps its
``kvpass.dequantize``: correct, slower, reported.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.fx import Graph, Node

from .attention_site import AttentionSite, Source
from .calls import DEQUANTIZE, ROTATE, arguments, compute, tensor_argument
from .heads import selected
from .latent import Expansion, expansion
from .masks import structure
from .nodes import integer, operand, operands, shape, value_of
from .own_cache import Present, read_back
from .sinks import concatenated, of_heads, rescaling
from .softmax import CASTS, PRODUCTS, SAME_VALUES, NotUnderstood, insert_bias, only_user, read_scores

aten = torch.ops.aten


def find(graph: Graph, presents: dict[Node, Present]) -> tuple[list[AttentionSite], list[str]]:
    """Every attention over packed state, in graph order, and the reasons why others were refused.

    presents: see `kvpass.compile.own_cache`.
    """
    return _collect(graph, partial(_source, presents=presents), _reads_packed)


def find_unpacked(graph: Graph) -> tuple[list[AttentionSite], list[str]]:
    """Every attention over the tokens of the call itself, in graph order; its sources have no past."""

    def is_attention(node: Node) -> bool:
        return node.target is aten.scaled_dot_product_attention.default or len(shape(node)) > 3

    found, refused = _collect(graph, _unpacked, is_attention)
    for attention in found:
        queries, keys = shape(attention.query)[2], shape(attention.key.present)[2]
        causal = attention.causal or (
            attention.mask is not None and structure(attention.mask, queries, unpadded=True) == "causal"
        )
        if queries != keys or not causal:
            refused.append("attention that is not causal over the tokens of the call")
        if attention.sinks is not None and not of_heads(attention.sinks):
            refused.append("attention with a sink for each query")
    return found, refused


def _collect(graph: Graph, source: Callable[[Node], Source], is_attention) -> tuple[list[AttentionSite], list[str]]:
    found, refused = [], []
    for node in list(graph.nodes):
        try:
            if node.target is aten.scaled_dot_product_attention.default:
                found.append(_from_sdpa(node, source))
            elif node.target is aten.softmax.int and is_attention(node):
                found.append(_from_softmax(node, source))
        except NotUnderstood as reason:
            if is_attention(node):
                refused.append(str(reason))
    return found, refused


def _reads_packed(node: Node, depth: int = 24) -> bool:
    """Whether ``node`` is computed from a dequantized cache, at most ``depth`` nodes upstream and with no other
    attention in between. The softmax of a router is not attention. The search is bounded, because everything is
    upstream of the last layer."""
    frontier = [node]
    for _ in range(depth):
        frontier = [source for n in frontier for source in n.all_input_nodes]
        if any(n.target is DEQUANTIZE for n in frontier):
            return True
        frontier = [n for n in frontier if n.op == "call_function" and not _is_attention_output(n)]
    return False


def _is_attention_output(node: Node) -> bool:
    if node.target not in PRODUCTS:
        return node.target is aten.scaled_dot_product_attention.default
    weights = operand(node)
    while weights.target in SAME_VALUES | CASTS | {aten.slice.Tensor, aten.reshape.default}:
        weights = operand(weights)
    return weights.target is aten.softmax.int


def _keeps_values(node: Node) -> bool:
    """Whether ``node`` returns its first argument unchanged, including dtype and layout."""
    if node.target in CASTS:
        return value_of(node).dtype == value_of(operand(node)).dtype
    if node.target in (aten.slice.Tensor, aten.reshape.default):
        return shape(node) == shape(operand(node))
    return node.target in SAME_VALUES


def _source(node: Node, presents: dict[Node, Present]) -> Source:
    """The source of keys or values ``[B, H, T, D]``. Raises `NotUnderstood`."""
    if presents and (read := read_back(node, presents)) is not None:
        past, present, padded = read
        rotation = past if past.target is ROTATE else None
        return Source(tensor_argument(past, "x") if rotation else past, present, rotation, padded)
    try:
        return _peeled(node)
    except NotUnderstood:
        found = selected(node)
        if found is None:
            raise
    whole, heads = found
    past, present = operands(whole)
    return Source(past, present, heads=heads)


def _unpacked(node: Node) -> Source:
    """The source of keys or values of the call itself, before heads are repeated. Raises `NotUnderstood`."""
    node = _base(node)
    if len(shape(node)) != 4:
        raise NotUnderstood(f"keys or values of shape {shape(node)} instead of [B, H, T, D]")
    return Source(None, node)


def _peeled(node: Node) -> Source:
    """The cache that keys or values ``[B, H, T, D]`` are read from. Raises `NotUnderstood`."""
    node = _base(node)
    if node.op != "call_function":
        raise NotUnderstood(f"keys or values come from {node.op} {node.name}, not from a packed cache")
    if node.target is DEQUANTIZE:
        return Source(node, None)
    if node.target is aten.cat.default:
        parts, dim = operands(node), node.args[1] if len(node.args) > 1 else 0
        past, present = parts if len(parts) == 2 and dim in (2, -2) else (None, None)
        if past is not None and past.target is DEQUANTIZE:
            return Source(past, present)
        if past is not None and past.target is ROTATE and tensor_argument(past, "x").target is DEQUANTIZE:
            return Source(tensor_argument(past, "x"), present, past)
        raise NotUnderstood("keys or values are concatenated with something other than the new tokens")
    if not _reads_packed(node):
        raise NotUnderstood(f"keys or values come from {node.target}, not from a packed cache")
    if node.target is aten.reshape.default:
        raise NotUnderstood("keys or values are reshaped by something other than head repetition")
    raise NotUnderstood(f"{node.target} stands between the cache and the attention")


def _base(node: Node) -> Node:
    """Keys or values as far back as `_behind` goes."""
    while (behind := _behind(node)) is not None:
        node = behind
    return node


def _behind(node: Node) -> Node | None:
    """Keys or values one step further back: before a view, or before heads were repeated or merged with the batch. None
    if ``node`` is none of these."""
    if node.op != "call_function":
        return None
    if node.target is aten.reshape.default and not (_keeps_values(node) or _merges_heads(node)):
        return _unrepeated(node)
    grouped = node.target is aten.unsqueeze.default and len(shape(node)) == 5 and node.args[1] in (2, -3)
    repeated = node.target is aten.repeat_interleave.self_int and node.args[2] in (1, -3)
    return operand(node) if _keeps_values(node) or _merges_heads(node) or grouped or repeated else None


def _unrepeated(node: Node) -> Node | None:
    """The input of the usual ``repeat_kv``: ``[B, H, T, D] -> unsqueeze(2) -> expand -> reshape [B, H r, T, D]``."""
    expand = operand(node)
    while expand.op == "call_function" and _keeps_values(expand):
        expand = operand(expand)
    if expand.target is aten.expand.default:
        unsqueeze = operand(expand)
        while unsqueeze.op == "call_function" and _keeps_values(unsqueeze):
            unsqueeze = operand(unsqueeze)
        if unsqueeze.target is aten.unsqueeze.default and unsqueeze.args[1] in (2, -3):
            inner = operand(unsqueeze)
            batch, heads, tokens, dim = shape(inner)
            if shape(node) == (batch, heads * shape(expand)[2], tokens, dim):
                return inner
    return None


def _sides(
    keys: Node, values: Node, source: Callable[[Node], Source]
) -> tuple[list[tuple[Source, Source]], Expansion | None]:
    """The sources of keys and of values for each cache, and how they are expanded from there. Raises
    `NotUnderstood`."""
    try:
        return [(source(keys), source(values))], None
    except NotUnderstood:
        of_keys, of_values = _caches(keys), _caches(values)
        if of_keys and of_values:
            return [(source(k), source(v)) for k, v in zip(of_keys, of_values, strict=True)], None
        found = expansion(keys, values)
        if found is None:
            raise
        return [(_peeled(found.latent), _peeled(found.rotary))], found


def _caches(node: Node) -> list[Node]:
    """The keys, or the values, of the two caches that ``node`` concatenates; empty if it does not."""
    node = _base(node)
    if node.target is not aten.cat.default or len(operands(node)) != 2 or node.args[1] not in (2, -2):
        return []
    return operands(node) if operands(node)[0].target is aten.cat.default else []


def _of_caches(site: AttentionSite, others: list[tuple[Source, Source]]) -> AttentionSite:
    """``site``, whose mask covers the tokens of its cache and then those of ``others``, at most one cache."""
    if not others:
        return site
    ((key, value),) = others
    if site.causal or site.key.padded or key.padded:
        raise NotUnderstood("two caches in one softmax that is causal, or whose slots are not all used")
    masks: list[Node | None] = [None, None]
    if site.mask is not None:
        graph = site.output.graph
        with graph.inserting_before(site.output):
            size = site.key.insert_size(graph)
            masks = [
                compute(graph, aten.slice.Tensor, site.mask, -1, 0, size),
                compute(graph, aten.slice.Tensor, site.mask, -1, size, sys.maxsize),
            ]
    second = replace(site, key=key, value=value, mask=masks[1], sinks=None)
    return replace(site, mask=masks[0], second=second)


def _absorbed(site: AttentionSite) -> AttentionSite:
    """``site`` with the query for what its layer caches, if keys are expanded from that."""
    if site.expansion is not None:
        with site.output.graph.inserting_before(site.output):
            site.query = site.expansion.absorb(site.output.graph, site.query)
    return site


def _from_sdpa(node: Node, source: Callable[[Node], Source]) -> AttentionSite:
    given = arguments(node)
    query, mask, causal, scale = (given[name] for name in ("query", "attn_mask", "is_causal", "scale"))
    if given["dropout_p"]:
        raise NotUnderstood("attention with dropout: call model.eval(), or set attention dropout to 0")
    ((key, value), *others), expanded = _sides(given["key"], given["value"], source)
    if key.padded and (mask is None or causal):
        raise NotUnderstood("no mask hides the unused slots behind the keys")
    scale = float(scale) if scale is not None else 1 / math.sqrt(shape(query)[-1])
    site = AttentionSite(node, query, key, value, mask, bool(causal), scale, expansion=expanded)
    return _of_caches(_absorbed(site), others)


def _only_user(node: Node) -> Node:
    return only_user(node, "the attention weights")


def _from_softmax(node: Node, source: Callable[[Node], Source]) -> AttentionSite:
    if node.args[1] not in (-1, len(shape(node)) - 1):
        raise NotUnderstood("softmax over a dim other than the keys")
    _drop_shift(node)
    before, sinks = concatenated(operand(node))
    output = _only_user(node)
    if sinks is not None:
        if output.target is not aten.slice.Tensor or output.args[1:] not in ((3, 0, -1), (-1, 0, -1)):
            raise NotUnderstood("the sink weights are not sliced off after the softmax")
        output = _only_user(output)
    while output.target in SAME_VALUES | CASTS or _merges_heads(output) or _splits_heads(output):
        output = _only_user(output)
    if output.target not in PRODUCTS:
        raise NotUnderstood(f"softmax is followed by {output.target} instead of a product with the values")
    rescaled = rescaling(before, output) if sinks is None else None
    scores = read_scores(before, rescaled and rescaled.logsumexp)
    last = {len(shape(scores.keys)) - 2, len(shape(scores.keys)) - 1}
    if (
        scores.keys.target is not aten.transpose.int
        or {integer(scores.keys, i) % (max(last) + 1) for i in (1, 2)} != last
    ):
        raise NotUnderstood(
            f"keys enter the product through {scores.keys.target} instead of a transpose of their last two dims"
        )
    ((key, value), *others), expanded = _sides(operand(scores.keys), operand(output, 1), source)
    query = _with_heads(scores.query, operand(scores.keys))
    with output.graph.inserting_before(output):
        mask = insert_bias(output.graph, scores, query)
    if key.padded and mask is None:
        raise NotUnderstood("no mask hides the unused slots behind the keys")
    if rescaled is not None:
        output, sinks = rescaled.output, rescaled.by_head()
    site = AttentionSite(output, query, key, value, mask, False, scores.scale, scores.softcap, sinks, expanded)
    return _of_caches(_absorbed(site), others)


def _drop_shift(softmax: Node) -> None:
    """If each row of scores has one number subtracted from it, such as its maximum, drop that: the softmax stays the
    same."""
    shifted = operand(softmax)
    while shifted.target in CASTS and len(shifted.users) == 1:
        shifted = operand(shifted)
    if shifted.target is not aten.sub.Tensor or len(shifted.users) != 1 or shifted.kwargs:
        return
    scores, less = shifted.args
    if not isinstance(scores, Node) or not isinstance(less, Node) or shape(scores) != shape(shifted):
        return
    if not shape(less) or shape(less)[-1] != 1:
        return
    shifted.replace_all_uses_with(scores)
    unused = [shifted]
    while unused:
        node = unused.pop()
        if not node.users and not node.is_impure() and node not in unused:
            unused += node.all_input_nodes
            node.graph.erase_node(node)


def _merges_heads(node: Node) -> bool:
    """Whether ``node`` turns ``[B, H, S, D]`` into ``[B * H, S, D]``."""
    if node.target is not aten.reshape.default or len(shape(node)) != 3 or len(shape(operand(node))) != 4:
        return False
    batch, heads, *rest = shape(operand(node))
    return shape(node) == (batch * heads, *rest)


def _splits_heads(node: Node) -> bool:
    """Whether ``node`` turns ``[B * H, S, D]`` into ``[B, H, S, D]``."""
    if node.target is not aten.reshape.default or len(shape(node)) != 4 or len(shape(operand(node))) != 3:
        return False
    batch, heads, *rest = shape(node)
    return shape(operand(node)) == (batch * heads, *rest)


def _merged(keys: Node) -> int | None:
    """How many heads of ``keys`` ``[B * H, T, D]`` were merged with the batch; None if that is not seen or varies."""
    while keys.op == "call_function" and _keeps_values(keys):
        keys = operand(keys)
    heads = shape(operand(keys))[1] if _merges_heads(keys) else None
    return heads if isinstance(heads, int) else None


def _with_heads(query: Node, keys: Node) -> Node:
    """Queries ``[B, H, S, D]``, from before heads were merged with the batch, or from after groups were merged. If they
    never had four dims, they are split like ``keys``, with whose heads they are multiplied."""
    merged = query
    while query.op == "call_function" and (_merges_heads(query) or (len(shape(query)) == 3 and _keeps_values(query))):
        query = operand(query)
    if len(shape(query)) == 5:
        with query.graph.inserting_after(query):
            merged = query.graph.call_function(aten.flatten.using_ints, (query, 1, 2))
        merged.meta["val"] = value_of(query).flatten(1, 2)
        return merged
    if len(shape(query)) == len(shape(merged)) == 3 and (heads := _merged(keys)) is not None:
        with merged.graph.inserting_after(merged):
            return compute(merged.graph, aten.unflatten.int, merged, 0, [-1, heads])
    if len(shape(query)) != 4:
        raise NotUnderstood(f"queries of shape {shape(query)} instead of [B, H, S, D]")
    return query
