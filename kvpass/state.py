"""`KVState`: the tensors that stand where one float K or V cache stood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .codec.affine import params_dtype
from .codec.pool import handle
from .codec.predict import MEAN
from .codec.spec import CodecSpec
from .codec.window import carry, layout
from .errors import KVPassError

_POOLS = ("_codes", "scale", "zero_point")
_MIN_PAGES = 4
_SPARE = 61  # more than asked for, so that sizes that vary independently are not equal when a graph is captured
GROWTH = 32  # pools grow by 1/32: at most 3 % of slack, each byte copied at most 32 times over a cache's life


def grown(old: Tensor, size: int, dim: int = 2) -> Tensor:
    """``old`` with ``size`` entries along ``dim``: its own, and zeros behind them."""
    shape = (*old.shape[:dim], size, *old.shape[dim + 1 :])
    new = old.new_zeros(shape)
    new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new


class SharedTensors(tuple):
    """Tensors that belong to a model, not to a cache: copies of a cache share them."""

    def __deepcopy__(self, memo) -> SharedTensors:
        return self


class KVState:
    """Packed storage of one logical ``[B, H_kv, n, D]`` tensor.

    codes: ``[B, H_kv, capacity, rows, D]`` uint8, planar pages. A state made with ``source`` has none of its own: it
        decodes with the codes of that state, which must take the same tokens at the same time.
    scale, zero_point: ``[B, H_kv, capacity, *spec.params_shape(D)]``, 16-bit.
    ring: ``[B, H_kv, sinks + window, D]``, the full-precision tokens, in the cache's dtype.
    compensation: ``[B, H_kv, D - b, D - b]``, 16-bit, for specs with a subspace; otherwise None.
    center: ``[B, H_kv, 1, D]``, 16-bit, for specs that subtract a mean; otherwise None.
    predictor: weights of the predictor that subtracts something else (`kvpass.codec.predict`); the model's.
    below, beside: the states it looks at: the same tokens in the layer below, and for values the keys of this layer.
    """

    def __init__(
        self,
        spec: CodecSpec,
        codes: Tensor | None,
        scale: Tensor,
        zero_point: Tensor,
        ring: Tensor,
        compensation: Tensor | None = None,
        source: KVState | None = None,
        center: Tensor | None = None,
    ):
        self.spec, self.text = spec, str(spec)
        self._codes, self.scale, self.zero_point, self.ring = codes, scale, zero_point, ring
        self.compensation, self.source, self.center = compensation, source, center
        self.predictor: Sequence[Tensor] = () if center is None else (center,)
        self.below: KVState | None = None
        self.beside: KVState | None = None
        self.written = 0  # slots of the ring have been written up to this token
        self.unpacked_from = 0  # tokens of earlier pages are not in the ring any more, whatever `written` says
        self._resized()

    @classmethod
    @torch.inference_mode(False)  # a cache filled in inference mode may go on outside of it
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
    ) -> KVState:
        """An empty state with room for ``tokens`` tokens. Raises `KVPassError` if the spec does not fit the head."""
        spec.check(head_dim)
        pages, lead, params = max(_MIN_PAGES, spec.pages(tokens)), (batch, heads), params_dtype(dtype)

        def zeros(*shape, dtype):
            return torch.zeros(*lead, *shape, dtype=dtype, device=device)

        compensation = None
        if spec.subspace is not None:
            rest = head_dim - spec.subspace.block_size
            compensation = zeros(rest, rest, dtype=params)
        return cls(
            spec,
            None if source else zeros(pages, spec.rows, spec.columns(head_dim), dtype=torch.uint8),
            zeros(pages, *spec.params_shape(head_dim), dtype=params),
            zeros(pages, *spec.zero_shape(head_dim), dtype=params),
            zeros(spec.sinks + spec.window, head_dim, dtype=dtype),
            compensation,
            source,
            zeros(1, head_dim, dtype=params) if spec.predictor == MEAN else None,
        )

    @property
    def codes(self) -> Tensor:
        """The pool of codes this state decodes with."""
        return self.source.codes if self.source else self._codes

    @property
    def handles(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a graph takes for codes, scale and zero point (`kvpass.codec.pool`)."""
        return (self.source.handles[0] if self.source else self._handles[0], *self._handles[1:])

    def _resized(self) -> None:
        self.nbytes = sum(tensor.nbytes for _, tensor in self.tensors())  # bytes of its own, slack included
        pools = (getattr(self, name) for name in _POOLS)
        self._handles = tuple(None if pool is None else handle(pool) for pool in pools)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of its own, by attribute name."""
        for name in (*_POOLS, "ring", "compensation", "center"):
            if (tensor := getattr(self, name)) is not None:
                yield name, tensor

    @torch.inference_mode(False)
    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of its own by ``fn`` of it (batch selection, device moves)."""
        for name, tensor in list(self.tensors()):
            setattr(self, name, fn(tensor))
        if self.center is not None:
            self.predictor = (self.center,)
        self._resized()

    @torch.inference_mode(False)
    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens, growing geometrically; contents are kept."""
        have, need = self.scale.shape[2], self.spec.pages(tokens)
        if need <= have:
            return
        pages = max(need, have + max(_MIN_PAGES, have // GROWTH))
        for name, old in list(self.tensors()):
            if name in _POOLS:
                setattr(self, name, grown(old, pages))
        self._resized()

    def carrier(self, n: int) -> Tensor:
        """A length carrier for calling the ops outside a cache."""
        return carry(n, self.ring.device)

    def append(self, x: Tensor, n: int, q: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Store ``x`` ``[B, H_kv, S, D]`` as tokens ``[n, n + S)``, growing as needed."""
        expected = (*self.ring.shape[:2], self.ring.shape[3])
        if x.ndim != 4 or (*x.shape[:2], x.shape[3]) != expected:
            raise KVPassError(f"Expected [B, H_kv, S, D] with B, H_kv, D = {expected}, got {tuple(x.shape)}.")
        if self.spec.needs_importance:
            raise KVPassError(
                "What is stored depends on the attention that tokens are paid: a cache knows it, one state does not."
            )
        self.reserve(n + x.shape[2])
        torch.ops.kvpass.append_(
            self.codes, self.scale, self.zero_point, self.ring, self.compensation,
            self.carrier(n), x.to(self.ring.dtype), q, mask, self.text, center=self.center,
        )  # fmt: skip
        self.wrote(n, n + x.shape[2])

    def wrote(self, start: int, stop: int) -> None:
        """Note that tokens ``[start, stop)`` have been stored: older ones may have lost their slots to them."""
        self.written, self.unpacked_from = (stop, 0) if start == 0 else (max(self.written, stop), self.unpacked_from)

    def evicted(self, gone: int) -> None:
        """Note that ``gone`` packed tokens have been dropped: later ones have moved up."""
        if gone:
            self.written -= gone
            self.unpacked_from = max(self.unpacked_from, self.spec.budget // self.spec.page_size)

    def decode(self, n: int) -> Tensor:
        """The ``n`` stored tokens, ``[B, H_kv, n, D]`` in the cache's dtype, and what they were predicted from."""
        below, beside = (state and state.decode(n) for state in (self.below, self.beside))
        return torch.ops.kvpass.decode(
            self.codes, self.scale, self.zero_point, self.ring, self.carrier(n), self.text, "auto", below, beside,
            list(self.predictor),
        )  # fmt: skip

    def _lost(self, n: int) -> Tensor:
        """Those of the tokens exact at length ``n`` that are not in the ring any more."""
        where = layout(self.spec)
        tokens = where.exact(n)
        gone = where.overwritten(tokens, self.written) | where.packed_before(tokens, self.unpacked_from)
        return tokens[gone]

    def lossless_crop(self, new: int) -> bool:
        """Whether going back to ``new`` tokens finds every token of the window then still in the ring."""
        return not self._lost(new).numel()

    def crop(self, old: int, new: int) -> None:
        """Forget tokens ``[new, old)``. Tokens of the window that are only in pages by now come back decoded."""
        lost = self._lost(new)
        if lost.numel():
            slots = layout(self.spec).slots(lost).to(self.ring.device)
            self.ring.index_copy_(2, slots, self.decode(old).index_select(2, lost.to(self.ring.device)))
            self.written, self.unpacked_from = new, self.spec.pages(new)

    def window(self, n: int) -> Tensor:
        """The full-precision tokens behind the sinks, in token order."""
        return layout(self.spec).read(self.ring, n)


class Importance:
    """What the stored tokens are worth to who decides which of them stay (`kvpass.codec.eviction`).

    weights: ``[B, H_kv, capacity]`` float32, or ``[B, 1, capacity]`` where all heads and layers keep the same.
    """

    @torch.inference_mode(False)
    def __init__(self, batch: int, heads: int, device, tokens: int):
        self.weights = torch.zeros(batch, heads, 0, device=device)
        self.reserve(tokens)

    def _resized(self) -> None:
        self.nbytes = self.weights.nbytes
        torch._dynamo.mark_dynamic(self.weights, 2)

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens; contents are kept."""
        have = self.weights.shape[2]
        if tokens > have:
            room = max(tokens, have + have // GROWTH) + _SPARE
            self.map_(lambda weights: grown(weights, room))

    @torch.inference_mode(False)
    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace the weights by ``fn`` of them."""
        self.weights = fn(self.weights)
        self._resized()


class RotaryState:
    """The rotary tables of every stored token, kept once for all layers that store keys before rotary embedding.

    cos, sin: ``[B, capacity, head_dim / 2]`` in the cache's dtype, scaled as the model scales them.
    """

    @torch.inference_mode(False)
    def __init__(self, batch: int, head_dim: int, dtype: torch.dtype, device, tokens: int):
        self.cos, self.sin = (torch.zeros(batch, tokens, head_dim // 2, dtype=dtype, device=device) for _ in range(2))
        self._resized()

    def _resized(self) -> None:
        self.nbytes = self.cos.nbytes + self.sin.nbytes
        for table in (self.cos, self.sin):
            torch._dynamo.mark_dynamic(table, 1)

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens; contents are kept."""
        have = self.cos.shape[1]
        if tokens > have:
            room = max(tokens, have + have // GROWTH + 64)
            self.map_(lambda table: grown(table, room, 1))

    @torch.inference_mode(False)
    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace both tables by ``fn`` of them."""
        self.cos, self.sin = fn(self.cos), fn(self.sin)
        self._resized()
