"""`KVState`: the tensors that stand where one float K or V cache stood."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .codec.affine import params_dtype
from .codec.spec import CodecSpec
from .codec.window import length_view, read_window, write_window
from .errors import KVPassError

_POOLS = ("codes", "scale", "zero_point")
_MIN_PAGES = 4
_GROWTH = 32  # pools grow by 1/32: at most 3 % of slack, each byte copied at most 32 times over a cache's life


@dataclass
class KVState:
    """Packed storage of one logical ``[B, H_kv, n, D]`` tensor.

    codes: ``[B, H_kv, capacity, rows, D]`` uint8, planar pages.
    scale, zero_point: ``[B, H_kv, capacity, *spec.params_shape(D)]``, 16-bit.
    ring: ``[B, H_kv, sinks + window, D]``, the full-precision tokens, in the cache's dtype.
    compensation: ``[B, H_kv, D - b, D - b]``, 16-bit, for specs with a subspace; otherwise None.
    """

    spec: CodecSpec
    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    ring: Tensor
    compensation: Tensor | None = None
    exact_from: int = 0  # oldest token whose ring slot has not been written over

    def __post_init__(self):
        self.text = str(self.spec)
        self._resized()

    @classmethod
    def allocate(
        cls, spec: CodecSpec, batch: int, heads: int, head_dim: int, dtype: torch.dtype, device, tokens: int
    ) -> "KVState":
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
            zeros(pages, spec.rows, head_dim, dtype=torch.uint8),
            zeros(pages, *spec.params_shape(head_dim), dtype=params),
            zeros(pages, *spec.params_shape(head_dim), dtype=params),
            zeros(spec.sinks + spec.window, head_dim, dtype=dtype),
            compensation,
        )

    def _resized(self) -> None:
        self.nbytes = sum(tensor.nbytes for _, tensor in self.tensors())  # bytes held, slack included
        for name in _POOLS:
            torch._dynamo.mark_dynamic(getattr(self, name), 2)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is kept, by name."""
        for name in (*_POOLS, "ring", "compensation"):
            if (tensor := getattr(self, name)) is not None:
                yield name, tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> "KVState":
        """A state whose tensors are ``fn`` of this one's (batch selection, device moves)."""
        return replace(self, **{name: fn(tensor) for name, tensor in self.tensors()})

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens, growing geometrically; contents are kept."""
        have, need = self.codes.shape[2], self.spec.pages(tokens)
        if need <= have:
            return
        pages = max(need, have + max(_MIN_PAGES, have // _GROWTH))
        for name in _POOLS:
            old = getattr(self, name)
            new = old.new_zeros((*old.shape[:2], pages, *old.shape[3:]))
            new[:, :, :have] = old
            setattr(self, name, new)
        self._resized()

    def carrier(self, n: int) -> Tensor:
        """A length carrier for calling the ops outside a cache."""
        return length_view(torch.tensor([n], device=self.ring.device), n)

    def append(self, x: Tensor, n: int, q: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Store ``x`` ``[B, H_kv, S, D]`` as tokens ``[n, n + S)``, growing as needed."""
        expected = (*self.ring.shape[:2], self.ring.shape[3])
        if x.ndim != 4 or (*x.shape[:2], x.shape[3]) != expected:
            raise KVPassError(f"Expected [B, H_kv, S, D] with B, H_kv, D = {expected}, got {tuple(x.shape)}.")
        self.reserve(n + x.shape[2])
        torch.ops.kvpass.append_(
            self.codes, self.scale, self.zero_point, self.ring, self.compensation,
            self.carrier(n), x.to(self.ring.dtype), q, mask, self.text,
        )  # fmt: skip
        self.wrote(n, n + x.shape[2])

    def wrote(self, start: int, stop: int) -> None:
        """Note that tokens ``[start, stop)`` have been stored: older ones may have lost their slots to them."""
        kept = 0 if start == 0 else self.exact_from
        self.exact_from = max(kept, stop - self.spec.window)

    def decode(self, n: int) -> Tensor:
        """The ``n`` stored tokens, ``[B, H_kv, n, D]`` in the cache's dtype."""
        return torch.ops.kvpass.decode(
            self.codes, self.scale, self.zero_point, self.ring, self.carrier(n), self.text
        )  # fmt: skip

    def lossless_crop(self, new: int) -> bool:
        """Whether going back to ``new`` tokens finds every token of the window then still in the ring."""
        return self.spec.sinks + self.spec.packed(new) >= min(self.exact_from, new)

    def crop(self, old: int, new: int) -> None:
        """Forget tokens ``[new, old)``. Tokens of the window that are only in pages by now come back decoded."""
        start = self.spec.sinks + self.spec.packed(new)
        if new > start and self.exact_from > start:
            lost = slice(start, min(self.exact_from, new))
            write_window(self.ring, self.spec, start, self.decode(old)[:, :, lost])
            self.exact_from = start

    def window(self, n: int) -> Tensor:
        """The full-precision tokens behind the sinks, in token order."""
        return read_window(self.ring, self.spec, min(n, self.spec.sinks) + self.spec.packed(n), n)
