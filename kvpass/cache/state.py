"""`KVState`: the packed tensors that replace the keys, or the values, of one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..codec.predictor import with_below
from ..codec.rope import rope_of
from ..codec.spec import CodecSpec
from ..codec.tensors import calibrated_shapes, fitted_shapes, of_model, of_pages, of_sequence, of_state, page_shapes
from ..errors import KVPassError
from ..layout.pool import bare_handle, handle
from ..layout.window import RecentLayout, Writes, layout, length_tensor, offset_of

if TYPE_CHECKING:
    from .per_cache import RotaryState

_MIN_PAGES = 4
_ALONE = "What this scheme stores depends on attention scores: a cache keeps them, a single state does not."
GROWTH = 32  # pools grow by 1/32: at most 3 % of slack, each byte copied at most 32 times over a cache's life


def grown(old: Tensor, size: int, dim: int = 2) -> Tensor:
    """``old`` with ``size`` entries along ``dim``; the new entries are zeros."""
    shape = (*old.shape[:dim], size, *old.shape[dim + 1 :])
    new = old.new_zeros(shape)
    new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new


class SharedTensors(tuple):
    """Tensors that belong to a model, not to a cache: copies of a cache share them."""

    def __deepcopy__(self, memo) -> SharedTensors:
        return self


class ModelTensors(SharedTensors):
    """`SharedTensors` whose bytes count towards the model, not towards its caches."""


class Storage:
    """Tensors that change together. All new tensors are created before the first is assigned, and all are assigned at
    once. So an error or an interrupt leaves either the old tensors or the new ones."""

    _nbytes: int
    moved = 0  # how often a tensor was replaced

    @property
    def nbytes(self) -> int:
        """Bytes of this storage, slack included."""
        return self._nbytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that this storage owns, by attribute name."""
        raise NotImplementedError

    def contents(self, n: int) -> dict[str, Tensor]:
        """The parts of the tensors that the ``n`` stored tokens occupy, by name."""
        raise NotImplementedError

    def fill(self, n: int, contents: Mapping[str, Tensor]) -> None:
        """Copy the `contents` of another storage with ``n`` tokens. There must be room. Raises `KVPassError` if shapes
        or dtypes differ."""
        own = self.contents(n)
        described = [{name: (t.shape, t.dtype) for name, t in part.items()} for part in (own, contents)]
        if described[0] != described[1]:
            raise KVPassError(f"Stored tensors do not match: {n} tokens need {described[0]}, got {described[1]}.")
        for name, tensor in own.items():
            tensor.copy_(contents[name])

    def _follows(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Attributes that are derived from ``tensors``, the new tensors."""
        return {"_nbytes": sum(tensor.nbytes for tensor in tensors.values())}

    @torch.inference_mode(False)
    def mapped(self, fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The arguments for `put` that replace every tensor by ``fn(tensor)``."""
        return {name: fn(tensor) for name, tensor in self.tensors()}

    @torch.inference_mode(False)
    def put(self, **changed: Any) -> None:
        """Replace the named attributes and everything derived from them."""
        whole = dict(self.tensors())
        whole.update({name: changed[name] for name in whole.keys() & changed.keys()})
        changed |= self._follows(whole) | {"moved": self.moved + 1}
        vars(self).update(changed)  # one call: no interrupt comes between

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by ``fn(tensor)`` (batch selection, device moves)."""
        self.put(**self.mapped(fn))

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)
        self.put()  # derived attributes refer to the tensors of the original


def attribute(name: str) -> str:
    """The attribute in which a state stores the tensor called ``name``."""
    return "_codes" if name == "codes" else name


class KVState(Storage):
    """Packed storage of one logical ``[B, H_kv, n, D]`` tensor.

    Each tensor that `codec.tensors` names for the spec is an attribute; `Codec.tensors` and `Codec.sequence` give
    shapes and dtypes. These are the tensors of every codec, and the other attributes:

    codes: ``[B, H_kv, capacity, rows, D]`` uint8, planar pages, or ``[B, 1, capacity, 1, bytes]`` if a page holds all
        heads. A state made with ``source`` has no quantized values of its own: it dequantizes with those of ``source``,
        which must store the same tokens at the same time.
    ring: ``[B, H_kv, sinks + ring_size, D]``, the full-precision tokens, in the cache's dtype.
    compensation: ``[B, H_kv, D - b, D - b]``, 16-bit, for specs with a subspace.
    center: ``[B, H_kv, 1, D]``, 16-bit, for specs that subtract a mean of the sequence.
    pairs: ``[B, H_kv, 1, 2]`` int16, for keys with page-relative RoPE: the number of rotated channel pairs, and whether
        they are interleaved. The tables are in ``rotary``, which states share.
    shared: the model's calibrated tensors (`Codec.model`), ``[1, H_kv, ...]`` each, shared by all its caches.
    predictor: weights of the predictor, for specs that have one (`kvpass.codec.predictor`). They belong to the model.
    previous_layer, layers_below: the state of the layer below, for tokens that are predicted from it, and the number of
        layers down to the lowest one they are predicted from.
    same_layer_keys: the key state of this layer, for values that are predicted from the keys, or that get more bits
        where the keys do.
    """

    ring: Tensor
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...

    _handles: tuple[Tensor, ...]
    _room: int  # pages

    def __init__(
        self,
        spec: CodecSpec,
        kept: Mapping[str, Tensor],
        source: KVState | None = None,
        shared: SharedTensors | None = None,
    ):
        self.spec, self.text, self.source = spec, str(spec), source
        self.shared = ModelTensors(shared or ())
        self._codes: Tensor | None = None
        self.predictor: Sequence[Tensor] = ()
        self.previous_layer: KVState | None = None
        self.layers_below = 1
        self.same_layer_keys: KVState | None = None
        self.rotary: RotaryState | None = None
        self.writes = Writes()
        if taken := [name for name in kept if name != "codes" and (name in vars(self) or hasattr(type(self), name))]:
            raise KVPassError(f"A codec cannot name its tensors {taken}: states use these names for something else.")
        vars(self).update({attribute(name): tensor for name, tensor in kept.items()})
        self.put()

    @classmethod
    @torch.inference_mode(False)  # a cache filled in inference mode may be used outside of it
    def allocate(
        cls,
        spec: CodecSpec,
        batch: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device,
        tokens: int,
        source: KVState | None = None,
        shared: SharedTensors | None = None,
    ) -> KVState:
        """An empty state with room for ``tokens`` tokens. Raises `KVPassError` if the spec does not fit the head, or if
        ``shared`` does not have one tensor for each that the codec takes from the model."""
        retention = spec.retention
        if spec.quantizer.adaptive is not None:
            raise KVPassError(_ALONE)
        spec.check(head_dim)
        names, shared = of_model(spec), SharedTensors(shared or ())
        if len(names) != len(shared):
            raise KVPassError(f"This codec takes {len(names)} calibrated tensors, {list(names)}; got {len(shared)}.")
        pages = max(_MIN_PAGES, retention.pages(tokens))

        def zeros(*shape, dtype):
            return torch.zeros(batch, heads, *shape, dtype=dtype, device=device)

        kept = {
            name: zeros(pages, *shape, dtype=kind) for name, (shape, kind) in page_shapes(spec, head_dim, dtype).items()
        }
        if spec.codec.whole_layer:
            size = spec.codec.page_bytes(dict(zip(names, shared, strict=True)), heads, head_dim, spec)
            kept["codes"] = torch.zeros(batch, 1, pages, 1, size, dtype=torch.uint8, device=device)
        if source is not None:
            del kept["codes"]
        kept["ring"] = zeros(retention.sinks + retention.ring_size, head_dim, dtype=dtype)
        for name, (shape, kind) in fitted_shapes(spec, head_dim, dtype).items():
            kept[name] = zeros(*shape, dtype=kind)
        return cls(spec, kept, source, shared)

    @torch.inference_mode(False)
    def calibrate(self, tensors: Sequence[Tensor]) -> None:
        """Copy the calibrated tensors of this layer: a datatype ``[2, 2**bits]``, and ranges ``[H_kv, 2, D]`` for
        keys."""
        for name, tensor in zip(calibrated_shapes(self.spec, self.ring.shape[3]), tensors, strict=True):
            getattr(self, name).copy_(tensor)

    @property
    def codes(self) -> Tensor:
        """The pool of quantized values that this state dequantizes with."""
        return self.source.codes if self.source else self._codes

    @property
    def pack(self) -> list[Tensor]:
        """The tensors of this state, in the order in which ops take them."""
        given = dict(zip(of_model(self.spec), self.shared, strict=True))
        return [given[name] if name in given else getattr(self, name) for name in of_state(self.spec)]

    @property
    def handles(self) -> list[Tensor]:
        """Like `pack`, for graphs: pools are represented by their handles (`kvpass.layout.pool`)."""
        return [self.source.handles[0], *self._handles[1:]] if self.source else list(self._handles)

    @property
    def pooled_planes(self) -> Sequence[Tensor]:
        """Further tensors that ``kvpass::dequantize`` takes, for tokens with individual bit widths."""
        return ()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in of_state(self.spec):
            if name not in of_model(self.spec) and (tensor := getattr(self, attribute(name))) is not None:
                yield attribute(name), tensor

    @property
    def _pools(self) -> set[str]:
        """Attributes that have one entry per page."""
        return set(map(attribute, of_pages(self.spec)))

    def _follows(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        pools = self._pools & tensors.keys()
        names = map(attribute, of_state(self.spec))
        given = {**tensors, **dict(zip(of_model(self.spec), self.shared, strict=True))}
        of_pool = bare_handle if self.spec.codec.whole_layer else handle
        handles = tuple(of_pool(given[name]) if name in pools else given.get(name) for name in names)
        room = tensors[attribute(of_pages(self.spec)[-1])].shape[2]  # the quantized values may belong to another state
        return super()._follows(tensors) | {"_handles": handles, "_room": room}

    def contents(self, n: int) -> dict[str, Tensor]:
        used = slice(self.spec.retention.pages(n))
        return {name: tensor[:, :, used] if name in self._pools else tensor for name, tensor in self.tensors()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_handles"}

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens. Memory grows geometrically; contents are preserved."""
        have, need = self._room, self.spec.retention.pages(tokens)
        if need <= have:
            return
        pages = max(need, have + max(_MIN_PAGES, have // GROWTH))
        with torch.inference_mode(False):
            self.put(**{name: grown(old, pages) for name, old in self.tensors() if name in self._pools})

    def reset(self) -> None:
        """Forget all tokens."""
        self.writes = Writes()

    def length_tensor(self, n: int) -> Tensor:
        """A length tensor of ``n``, for calling ops outside a cache."""
        return length_tensor(n, self.ring.device, offset_of(self.spec.retention))

    def append(self, x: Tensor, n: int, q: Tensor | None = None, mask: Tensor | None = None, rope: str = "") -> None:
        """Store ``x`` ``[B, H_kv, S, D]`` as tokens ``[n, n + S)``, and grow if needed.

        rope: how keys with page-relative RoPE are rotated, by tables that ``rotary`` already holds.

        Raises `KVPassError` if the shape does not match, or if what the spec stores depends on attention scores.
        """
        expected = (*self.ring.shape[:2], self.ring.shape[3])
        if x.ndim != 4 or (*x.shape[:2], x.shape[3]) != expected:
            raise KVPassError(f"Expected [B, H_kv, S, D] with B, H_kv, D = {expected}, got {tuple(x.shape)}.")
        if self.spec.needs_importance:
            raise KVPassError(_ALONE)
        self.reserve(n + x.shape[2])
        torch.ops.kvpass.append_(
            self.pack, self.length_tensor(n), x.to(self.ring.dtype), q, mask, self.text, **self.tables(rope),
            keys=self.keys,
        )  # fmt: skip
        self.wrote(n, n + x.shape[2])

    def wrote(self, start: int, stop: int) -> None:
        """Record that tokens ``[start, stop)`` have been stored. They may have overwritten the slots of older
        tokens."""
        self.writes = self.writes.wrote(start, stop, self.spec.retention.pages(start))

    def evicted(self, gone: int) -> None:
        """Record that ``gone`` packed tokens have been evicted, and that later ones have moved up."""
        if gone:
            self.writes = self.writes.evicted(gone, self.spec.retention.budget // self.spec.page_size)

    def free(self, n: int, gone: int) -> None:
        """Free the ``gone`` tokens after the sinks, which fill whole pages, of ``n`` stored ones; later ones move up.
        Memory that a long prompt needed for pages behind a sliding window is released."""
        retention, sinks = self.spec.retention, self.spec.retention.sinks
        first, stop, room = gone // retention.page_size, retention.pages(n), retention.pages(retention.most or n)
        pools = {name: tensor for name, tensor in self.tensors() if name in self._pools}
        if self._room > max(room, _MIN_PAGES):
            with torch.inference_mode(False):
                self.put(**{name: grown(old[:, :, first:stop], max(room, _MIN_PAGES)) for name, old in pools.items()})
        else:
            for pool in pools.values():
                pool[:, :, : stop - first] = pool[:, :, first:stop].clone()
        self.ring[:, :, sinks:] = self.ring[:, :, sinks:].roll(-gone, 2)
        self.writes = self.writes.freed(gone, first)

    def dequantize(self, n: int, lowering: str = "auto") -> Tensor:
        """The ``n`` stored tokens, ``[B, H_kv, n, D]`` in the cache's dtype. This dequantizes the states they are
        predicted from, too."""
        return self._dequantize_with_below(n, lowering, 1)

    def _dequantize_with_below(self, n: int, lowering: str, layers: int) -> Tensor:
        """The ``n`` stored tokens of this layer and those below (`codec.predictor.with_below`), as `dequantize`."""
        below = keys = None
        if self.spec.transform.predictor and self.previous_layer is not None:
            below = self.previous_layer._dequantize_with_below(n, lowering, self.layers_below)
            keys = None if self.same_layer_keys is None else self.same_layer_keys.dequantize(n, lowering)
        tokens: Tensor = torch.ops.kvpass.dequantize(
            self.pack, self.length_tensor(n), self.text, lowering, below, keys, list(self.predictor),
            list(self.pooled_planes), **self.tables(),
        )  # fmt: skip
        return with_below(tokens, below, layers)

    def tables(self, rope: str | None = None) -> dict[str, Any]:
        """Further arguments of the ops, for keys with page-relative RoPE. ``rope``: how the new tokens are rotated; by
        default, as the stored ones are."""
        if not self.spec.transform.page_rope:
            return {}
        if self.spec.transform.numbered:
            rope = self.spec.transform.numbered
        elif rope is None:
            pairs, interleaved = self.pairs[0, 0, 0].tolist()
            rope = rope_of(pairs, bool(interleaved))
        return dict(cos=self.rotary and self.rotary.cos, sin=self.rotary and self.rotary.sin, rope=rope)

    @property
    def keys(self) -> list[Tensor] | None:
        """A further argument of ``kvpass::append_``, for values that follow the bit widths of their keys: the handle of
        the keys, and what is fitted to both (`Codec.from_keys`)."""
        keys = self.same_layer_keys if self.spec.quantizer.follows_keys else None
        if keys is None:
            return None
        return [keys.handles[0], *(getattr(keys, name) for name in self.spec.codec.from_keys)]

    @property
    def _layout(self) -> RecentLayout:
        return layout(self.spec.retention)

    def _lost(self, n: int) -> Tensor:
        """The tokens that are exact at length ``n`` and are no longer in the ring."""
        tokens = self._layout.exact(n)
        return tokens[self.writes.lost(tokens, self._layout)]

    def lossless_crop(self, new: int) -> bool:
        """Whether every token in the window at length ``new`` is still in the ring."""
        return not self._lost(new).numel()

    def crop(self, old: int, new: int, lowering: str = "auto") -> None:
        """Forget tokens ``[new, old)``. Tokens that return to the window from a page are dequantized. If no page is
        left, the basis is fitted again, without the prompt's queries, which are gone: all errors count the same."""
        lost = self._lost(new)
        if lost.numel():
            device = self.ring.device
            decoded = self.dequantize(old, lowering).index_select(2, lost.to(device))
            self.ring.index_copy_(2, self._layout.slots(lost).to(device), decoded)
            self.writes = Writes(((0, new),), self.spec.retention.pages(new))
        pages = self.spec.retention.pages
        if pages(old) and not pages(new):
            fitted = {name: getattr(self, name) for name in of_sequence(self.spec)}
            self.spec.codec.fit_queries(fitted, None, None, self.spec)

    def window(self, n: int) -> Tensor:
        """The full-precision tokens after the sinks, in token order."""
        return self._layout.read(self.ring, n)
