"""What `kvpass.compile.find` matches: attention, and where its keys and values come from."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..codec.spec import parse
from ..layout.window import offset_of
from .appends import tensor_of
from .calls import argument, compute, tensor_argument, tensors_argument
from .latent import Expansion

aten = torch.ops.aten


@dataclass
class Source:
    """Where attention's keys or values come from: ``cat([past, present])``, with heads repeated in order.

    past: the node that dequantizes the cache; None if there is none.
    present: keys or values of the call; None for cross-attention.
    rotation: the node that rotates the past when it is read, if keys are stored before rotary embedding.
    padded: whether there is room after the present, which the mask hides.
    heads: the cached head that each head of attention is, if they are not all heads in order.
    """

    past: Node | None
    present: Node | None
    rotation: Node | None = None
    padded: bool = False
    heads: tuple[int, ...] = ()

    @property
    def needed_elsewhere(self) -> bool:
        """Whether the past has to be dequantized anyway: another layer is predicted from it, it belongs to another
        layer, its heads are in another order, or its tokens have individual bit widths."""
        codec, elsewhere = parse(self.read("spec")), len(self.past.users) > 1 or bool(self.heads)
        return elsewhere or bool(codec.transform.predictor) or codec.quantizer.adaptive is not None

    @property
    def ring(self) -> Node:
        """The ring of exact tokens of the past, which is always the layer's own; quantized values may be another
        layer's."""
        return tensor_of(tensors_argument(self.past, "state"), parse(self.read("spec")), "ring")

    def read(self, name: str) -> Any:
        """An argument of the call that dequantizes the past."""
        return argument(self.past, name)

    def insert_size(self, graph: Graph) -> Node:
        """Nodes at the insertion point that compute the number of all tokens, past and present, from the length of the
        cache."""
        length = tensor_argument(self.past, "length")
        size = compute(graph, aten.sym_size.int, length, 0)
        if self.present is not None:
            size = compute(graph, operator.add, size, compute(graph, aten.sym_size.int, self.present, 2))
        return compute(graph, operator.sub, size, offset_of(parse(self.read("spec")).retention))


@dataclass
class AttentionSite:
    """One matched attention.

    output: the node to replace, ``[B, H_q, S, D]``, ``[B * H_q, S, D]`` or ``[B, H_kv, r, S, D]``.
    sinks: logits ``[1, H_q, 1, 1]`` or ``[B, H_q, S, 1]`` that take part in the softmax without a value.
    expansion: for latent attention: how keys and values are expanded from the latent and the rotary part that ``key``
        and ``value`` are then. ``query`` is absorbed.
    second: if the keys are those of two caches, attention to the second of them, in the same softmax.
    """

    output: Node
    query: Node
    key: Source
    value: Source
    mask: Node | None
    causal: bool
    scale: float
    softcap: float = 0.0
    sinks: Node | None = None
    expansion: Expansion | None = None
    second: "AttentionSite | None" = None

    @property
    def parts(self) -> list["AttentionSite"]:
        """Attention to each cache."""
        return [self] if self.second is None else [self, self.second]
