"""What an error in a cached key or value costs: the Fisher information of a model's own predictions.

For a small error e in the cache, the expected KL of the next tokens is e^T F e / 2. F is the second moment of gradients
of log p(y), for y sampled from the model. One backward pass per text gives it for all layers, heads and tokens, because
labels of different tokens are independent. A token only counts for later queries that see it outside the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..errors import KVPassError
from ..models.arguments import filling
from ..models.probe import fresh_cache
from ..schemes import LayerGeometry
from .backward import backward


class Seen:
    """The inputs of one layer's attention for ``[1, T]`` tokens, after rotary embedding.

    Queries ``[H_q, T, D]``, scaled; keys and values ``[H, T, D]``; and gradients ``[H, T, D]`` with respect to keys and
    values as later queries see them.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor):
        self.q, self.k, self.v = q, k, v
        self.of_keys = self.of_values = torch.empty(0)


class _Tap(TorchFunctionMode):
    """Within this context, the SDPA that follows a write to a packed cache layer runs on keys and values that are
    autograd leaves, wherever a query is at least ``far[layer]`` tokens later and they are not among the first
    ``sinks``."""

    def __init__(self, layers: dict[int, LayerGeometry], far: Mapping[int, int], sinks: int):
        super().__init__()
        self.layers, self.far, self.sinks = layers, far, sinks
        self.written: int | None = None  # the layer whose attention is expected next
        self.seen: dict[int, Seen] = {}
        self.leaves: list[Tensor] = []

    @contextmanager
    def watching(self, cache: Any) -> Iterator[None]:
        """Within this context, record which layer of ``cache`` is written."""

        def noting(index: int, update: Callable) -> Callable:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                self.written = index if index in self.layers else None
                return update(*args, **kwargs)

            return wrapped

        layers = list(cache.layers)
        for index, layer in enumerate(layers):
            layer.update = noting(index, layer.update)
        try:
            yield
        finally:
            for layer in layers:
                del layer.update  # a layer that refers to itself would keep the graph of its keys alive

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and self.written is not None:
            index, self.written = self.written, None
            return self._attend(index, *args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        heads = self.layers[index].num_key_value_heads
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        each = key.shape[1] // heads  # how often a KV head was repeated for its query heads
        k, v = key[:, ::each], value[:, ::each]
        self.seen[index] = Seen(*((x.detach()[0]) for x in (query * scale, k, v)))
        leaves = [torch.zeros_like(x).requires_grad_() for x in (k, v)]
        self.leaves += leaves
        tokens = torch.arange(query.shape[2], device=query.device)
        behind = tokens[:, None] - tokens
        far = ((behind >= self.far[index]) & (tokens >= self.sinks)).to(query.dtype)
        if attn_mask is None and is_causal:
            attn_mask = behind >= 0
        out: Tensor = checkpoint(_attention, query, k, v, *leaves, attn_mask, far, scale, use_reentrant=False)
        return out


def _attention(q, k, v, dk, dv, mask, far, scale: float) -> Tensor:
    """Attention of ``q`` over ``k`` and ``v``, or over ``k + dk`` and ``v + dv`` where ``far`` is 1."""
    k, v, dk, dv = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v, dk, dv))
    scores = (q @ k.mT + q @ dk.mT * far) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.float().softmax(-1).to(q.dtype)
    return weights @ v + (weights * far) @ dv


def look(
    model: nn.Module,
    ids: Tensor,
    layers: dict[int, LayerGeometry],
    far: Mapping[int, int],
    sinks: int,
    generator: torch.Generator,
) -> dict[int, Seen]:
    """The inputs of the attention of ``layers`` when ``model`` reads ``ids`` ``[1, T]``, and what errors in them cost.

    far, sinks: a token counts for queries at least ``far[layer]`` tokens later, unless it is among the first ``sinks``.

    Raises `KVPassError` if the attention of a layer does not use SDPA, whose arguments can be observed.
    """
    cache: Any = fresh_cache(model)
    tap = _Tap(layers, far, sinks)
    while len(cache.layers) <= max(layers):
        cache.layers.append(cache.layer_class_to_replicate())
    with backward(model):
        with tap.watching(cache), tap:
            logits = model(input_ids=ids, **filling(model, cache)).logits[0, min(far.values()) :]
        if missing := sorted(set(layers) - set(tap.seen)):
            raise KVPassError(
                f"Calibration measures quantization sensitivity in calls of SDPA, but {len(missing)} layers do not "
                "call it: load the model with attn_implementation='sdpa'."
            )
        labels = _sampled(logits.detach(), generator)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        gradients = iter(torch.autograd.grad(loss, tap.leaves))
    for seen in tap.seen.values():
        seen.of_keys, seen.of_values = next(gradients)[0], next(gradients)[0]
    return tap.seen


_ROWS = 128


def _sampled(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One token ``[T]`` sampled from each of the distributions ``[T, V]``."""
    parts = [
        torch.multinomial(part.float().softmax(-1).cpu(), 1, generator=generator)[:, 0] for part in logits.split(_ROWS)
    ]
    return torch.cat(parts).to(logits.device)
