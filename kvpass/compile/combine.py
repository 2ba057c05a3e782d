"""Nodes that combine outputs of attention by the log-sum-exp of their scores.

An output is ``[B, H, S, D]``, a log-sum-exp ``[B, H, S]`` float32, -inf for a query that sees nothing.
"""

from functools import partial

import torch
from torch.fx import Graph, Node

from .calls import compute
from .nodes import value_of

aten = torch.ops.aten


def over_both(graph: Graph, first: tuple[Node, Node], second: tuple[Node, Node]) -> tuple[Node, Node]:
    """Output and log-sum-exp of attention over the tokens of ``first`` and of ``second``."""
    call = partial(compute, graph)
    (out, lse), (other, other_lse) = first, second
    share = call(aten.sigmoid.default, call(aten.sub.Tensor, lse, other_lse))
    share = call(aten.unsqueeze.default, call(aten.nan_to_num.default, share), -1)  # nan: neither sees a token
    floats = (call(aten.to.dtype, x, torch.float32) for x in (other, out))
    both = call(aten.to.dtype, call(aten.lerp.Tensor, *floats, share), value_of(out).dtype)
    return both, call(aten.logaddexp.default, lse, other_lse)


def with_sinks(graph: Graph, out: Node, lse: Node, sinks: Node) -> Node:
    """``out`` if the logits ``sinks`` ``[B, H, S, 1]`` join the softmax without a value."""
    call = partial(compute, graph)
    more = call(aten.sub.Tensor, call(aten.unsqueeze.default, lse, -1), call(aten.to.dtype, sinks, torch.float32))
    scaled = call(aten.mul.Tensor, call(aten.to.dtype, out, torch.float32), call(aten.sigmoid.default, more))
    return call(aten.to.dtype, scaled, value_of(out).dtype)
