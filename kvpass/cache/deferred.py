"""`DeferredKV`: what a layer's ``update`` returns when the model runs without a graph.

Attention (SDPA) over such tensors reads the cache as it is stored, by ``kvpass::attend``. Anything else that reads them
gets dequantized tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..codec.tensors import of_pages
from ..errors import KVPassError

if TYPE_CHECKING:
    from .layer import PackedLayer
    from .state import KVState

_ADDED_DIM = slice(None), slice(None), None, slice(None), slice(None)


class LayerRead:
    """One layer's past and present in one forward: ``n`` stored tokens, and the keys and values ``[B, H_kv, S, D]`` of
    the call.

    The layer stores the present at once. That overwrites slots of the window, so the window is copied first. Pages that
    exist are not changed before the next forward.
    """

    def __init__(self, layer: PackedLayer, keys: Tensor, values: Tensor):
        states = layer.states()
        self._past: list[list[Tensor]] | None = [_copied(state) for state in states]
        self._states, self._tables = states, states[0].tables("")
        self._length, self._lowering, self._new = layer.length, layer.cache.lowering, (keys, values)
        self._total = layer.get_mask_sizes(keys.shape[2])[0]
        self._tensors: list[weakref.ref[DeferredKV]] = []

    def tensors(self) -> tuple[DeferredKV, DeferredKV]:
        """Past and present keys and values, each ``[B, H_kv, n + S, D]``."""
        keys, values = (self._tensor(which) for which in range(2))
        return keys, values

    def _tensor(self, which: int) -> DeferredKV:
        new = self._new[which]
        shape = *new.shape[:2], self._total, new.shape[3]
        made = DeferredKV(self, which, shape, lambda: self._dequantized(which))
        self._tensors.append(weakref.ref(made))
        return made

    def _dequantized(self, which: int) -> Tensor:
        state, past = self._states[which], self._stored()[which]
        tables = self._tables if which == 0 else {}
        stored = torch.ops.kvpass.dequantize(past, self._length, state.text, self._lowering, **tables)
        return torch.cat((stored, self._new[which]), 2)

    def _stored(self) -> list[list[Tensor]]:
        if self._past is None:
            raise KVPassError(
                "Keys and values of a packed cache were read after the forward that failed. Call the model again."
            )
        return self._past

    def attend(self, q: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention of ``q`` ``[B, H_q, R, D]`` over past and present, in which only ``mask`` hides tokens.

        mask: ``[B or 1, H_q or 1, R, n + S]``, bool (True: may attend) or added to the scores; None hides nothing.
        """
        texts = (state.text for state in self._states)
        out: Tensor = torch.ops.kvpass.attend(
            q,
            *self._stored(),
            self._length,
            *self._new,
            mask,
            False,
            scale,
            0.0,
            *texts,
            self._lowering,
            **self._tables,
        )[0]
        return out

    def finish(self, succeeded: bool) -> None:
        """End the forward. Tensors that still exist are dequantized, because the next forward may change pages."""
        alive = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        for tensor in alive if succeeded else ():
            tensor.dequantize()
        self._past = None


def _copied(state: KVState) -> list[Tensor]:
    """The tensors of ``state`` as ops take them, with a copy of the window."""
    tensors = state.handles
    tensors[len(of_pages(state.spec))] = state.ring.clone()
    return tensors


class DeferredKV(Tensor):
    """Past and present keys, or values, of a layer.

    Attention reads them as they are stored, also if each head was repeated for its query heads in the way that
    transformers does it. Any other operation runs on the dequantized tensor, which is then kept.
    """

    read: LayerRead
    which: int  # 0: keys, 1: values
    repeats: int  # how often each head is repeated; 0 while that is under way
    _make: Callable[[], Tensor]
    _dense: Tensor | None

    @staticmethod
    def __new__(cls, read: LayerRead, which: int, shape: Any, make: Callable[[], Tensor], repeats: int = 1):
        new = read._new[which]
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=new.dtype, device=new.device)
        self.read, self.which, self.repeats, self._make, self._dense = read, which, repeats, make, None
        return self

    def __init__(self, *_, **__):
        pass

    def dequantize(self) -> Tensor:
        """The dequantized tensor."""
        if self._dense is None:
            self._dense = self._make()
        return self._dense

    def _derived(self, fn: Callable[[Tensor], Tensor], shape: tuple[int, ...], repeats: int) -> DeferredKV:
        made = DeferredKV(self.read, self.which, shape, lambda: fn(self.dequantize()), repeats)
        self.read._tensors.append(weakref.ref(made))
        return made

    def _with_repeated_heads(self, func: Callable, args: tuple, kwargs: dict) -> DeferredKV | None:
        """The result of one step of repeating each head: an added dim, its expansion, and its merging with the heads.
        None if ``func`` does something else."""
        shape = torch.Size(self.size())
        if func is Tensor.__getitem__ and args == (_ADDED_DIM,) and self.repeats == 1 and len(shape) == 4:
            return self._derived(lambda x: x[_ADDED_DIM], (*shape[:2], 1, *shape[2:]), 0)
        sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        if kwargs or self.repeats or len(shape) != 5 or not all(isinstance(size, int) for size in sizes):
            return None
        if func is Tensor.expand and len(sizes) == 5 and (*sizes[:2], 1, *sizes[3:]) == tuple(shape):
            return self._derived(lambda x: x.expand(sizes), tuple(sizes), 0)
        if func is Tensor.reshape and tuple(sizes) == (shape[0], shape[1] * shape[2], *shape[3:]):
            return self._derived(lambda x: x.reshape(sizes), tuple(sizes), shape[2])
        return None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, found = kwargs or {}, None
        if func is scaled_dot_product_attention:
            found = _attention(*args, **kwargs)
        elif func in _REPEATING and isinstance(args[0], cls) and args[0]._dense is None:
            found = args[0]._with_repeated_heads(func, args[1:], kwargs)
        if found is not None:
            return found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda x: x.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)


_REPEATING = Tensor.__getitem__, Tensor.expand, Tensor.reshape


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """SDPA over keys and values of one layer, as they are stored; None if they cannot be read that way."""
    both = key, value
    if (
        not all(isinstance(x, DeferredKV) and x._dense is None and x.repeats for x in both)
        or key.read is not value.read
    ):
        return None
    if (key.which, value.which) != (0, 1) or isinstance(query, DeferredKV) or dropout_p or is_causal:
        return None
    batch, heads, tokens, head_dim = key.size()
    fits = query.ndim == 4 and query.dtype == key.dtype and (query.shape[0], query.shape[3]) == (batch, head_dim)
    if not fits or torch.is_autocast_enabled(query.device.type):
        return None
    shares = enable_gqa or heads == 1  # torch broadcasts a single head
    if value.size(1) != heads or (query.shape[1] % heads if shares else query.shape[1] != heads):
        return None
    if attn_mask is not None:
        shape = *query.shape[:3], tokens
        mask = attn_mask[(None,) * (4 - attn_mask.ndim)] if attn_mask.ndim < 4 else attn_mask
        if any(mine not in (1, full) for mine, full in zip(mask.shape, shape, strict=True)) or mask.shape[3] != tokens:
            return None
        attn_mask = mask.expand(-1, -1, shape[2], -1)
    return key.read.attend(query, attn_mask, head_dim**-0.5 if scale is None else scale)
