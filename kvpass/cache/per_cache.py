"""State that one layer of a cache keeps for other layers too: attention mass of tokens, and rotary tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..codec.page_rope import numbered, rows
from ..codec.spec import CodecSpec
from ..layout.window import length_tensor
from .state import GROWTH, ModelTensors, Storage, grown

_LEAST_GROWTH = 64  # tokens
_SPARE = 61  # extra entries, so that sizes that vary independently are not equal when a graph is captured


class Importance(Storage):
    """Attention mass of the stored tokens, which decides which tokens stay (`kvpass.layout.eviction`).

    weights: ``[B, H_kv, capacity]`` float32, or ``[B, 1, capacity]`` if all heads and layers keep the same tokens.
    """

    @torch.inference_mode(False)
    def __init__(self, batch: int, heads: int, device, tokens: int):
        self.weights = torch.zeros(batch, heads, 0, device=device)
        self.before: dict[str, Tensor] | None = None  # contents before the running forward
        self.put()
        self.reserve(tokens)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weights", self.weights

    def contents(self, n: int) -> dict[str, Tensor]:
        return {name: tensor[..., :n] for name, tensor in self.tensors()}

    def _follows(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        torch._dynamo.mark_dynamic(tensors["weights"], 2)
        return super()._follows(tensors)

    @torch.inference_mode(False)
    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens; contents are preserved."""
        have = self.weights.shape[2]
        if tokens > have:
            room = max(tokens, have + have // GROWTH) + _SPARE
            self.put(**self.mapped(lambda tensor: grown(tensor, room, tensor.ndim - 1)))

    @torch.inference_mode(False)
    def start(self, n: int, new_tokens: int) -> None:
        """Start a forward of ``new_tokens`` tokens after the ``n`` stored tokens."""
        self.before = {name: tensor.clone() for name, tensor in self.contents(n).items()}

    def end(self, succeeded: bool = True) -> None:
        """End the forward. If it failed, restore the contents from before it."""
        if self.before is not None and not succeeded:
            for name, tensor in self.before.items():
                own, n = getattr(self, name), tensor.shape[-1]
                own[..., :n], own[..., n:] = tensor, 0
        self.before = None

    def crop(self, n: int) -> None:
        """Forget all tokens but the first ``n``."""
        for _, tensor in self.tensors():
            tensor[..., n:] = 0


class RecentAttention(Importance):
    """The largest attention weight that each token received from the last ``rows`` queries.

    Bit widths of tokens are chosen from it whenever a page is due, or after every token (`Adaptive.rows`, `every`). If
    a window of queries begins within a call of several tokens, all queries of that call may count.

    Windows of queries end where widths are chosen, so windows longer than a page overlap. ``weights`` covers the
    queries since the last window began.

    earlier: ``[B, H_kv, overlapping windows - 1, capacity]`` float32: for each earlier window that overlaps the last
        one, the queries from its beginning to the beginning of the next window, oldest first.
    """

    @torch.inference_mode(False)
    def __init__(self, spec: CodecSpec, batch: int, heads: int, device, tokens: int):
        adaptive = spec.quantizer.adaptive
        self.rows, self.period = adaptive.rows, 1 if adaptive.every == "token" else spec.page_size
        self.first_due = spec.retention.sinks + spec.retention.residual  # later ones every ``period`` tokens
        self.overlapping = -(-self.rows // self.period)
        self.earlier = torch.zeros(batch, heads, self.overlapping - 1, 0, device=device)
        self.leaving: Tensor | None = None  # during a forward: the block that no later window covers
        super().__init__(batch, heads, device, tokens)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors()
        if self.overlapping > 1:
            yield "earlier", self.earlier

    def _blocks(self) -> list[Tensor]:
        """Largest weights of each block of queries, oldest first: ``[B, H_kv, blocks, capacity]`` each."""
        newest = self.weights.unsqueeze(2)
        return [self.earlier, newest] if self.overlapping > 1 else [newest]

    def _begun(self, n: int, new_tokens: int) -> int:
        """How many windows begin at one of the ``new_tokens`` queries that follow ``n`` tokens."""
        first = n + self.rows - self.first_due
        return (first + new_tokens - 1) // self.period - (first - 1) // self.period

    @torch.inference_mode(False)
    def start(self, n: int, new_tokens: int) -> None:
        super().start(n, new_tokens)
        if not n or new_tokens >= self.rows:
            for _, tensor in self.tensors():
                tensor.zero_()
        elif begun := self._begun(n, new_tokens):
            blocks = torch.cat(self._blocks(), 2)
            self.leaving, kept = blocks[:, :, begun - 1 : begun], blocks[:, :, begun:]
            if self.overlapping > 1:
                self.earlier.zero_()[:, :, : kept.shape[2]] = kept
            self.weights.zero_()

    def end(self, succeeded: bool = True) -> None:
        super().end(succeeded)
        self.leaving = None

    def largest(self, n: int) -> Tensor:
        """The largest weight that each of the first ``n`` tokens received from the last queries, ``[B, H_kv, n]``.
        Valid until the forward that stored token ``n - 1`` ends."""
        blocks = self._blocks()
        since_due = (n - self.first_due) % self.period
        if self.leaving is not None and since_due + self.rows > self.overlapping * self.period:
            blocks.append(self.leaving)
        return torch.cat([block[..., :n] for block in blocks], 2).amax(2)


class RotaryState(Storage):
    """Rotary tables, stored once for all layers that need the same.

    spec: the spec of the keys.
    cos, sin: ``[B, capacity, head_dim / 2]`` in the cache's dtype, scaled as the model scales them. For keys stored
        before rotary embedding there is one row per stored token; for keys with page-relative RoPE, the rows are those
        of `codec.page_rope`.
    angles: ``[p]``, for page-relative RoPE by token numbers: the tables are computed from these angles when room is
        made.
    starts: ``[B, 1]`` int64, the first stored token of each row after its padding, for tables by token numbers;
        negative by the number of tokens freed behind a sliding window. Otherwise None.
    """

    starts: Tensor | None

    @torch.inference_mode(False)
    def __init__(
        self, spec: CodecSpec, batch: int, head_dim: int, dtype: torch.dtype, device, tokens: int,
        angles: Tensor | None = None,
    ):  # fmt: skip
        self.spec, shape = spec, (batch, self._rows(spec, tokens), head_dim // 2)
        self.angles = None if angles is None else ModelTensors([angles.to(device)])
        self.cos, self.sin = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.starts = None if angles is None else torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._fill(0, self.cos, self.sin)
        self.put()

    @torch.inference_mode(False)
    def begin(self, mask: Tensor | None) -> None:
        """Number the tokens of each row from its first token that a padding ``mask`` ``[B, T]`` does not hide; without
        a mask, from token 0."""
        if self.starts is not None:
            self.starts.copy_(torch.zeros_like(self.starts) if mask is None else mask.ne(0).long().argmax(-1, True))
            self._fill(0, self.cos, self.sin)

    def _fill(self, first: int, cos: Tensor, sin: Tensor) -> None:
        """Compute the tables from `angles`, from row ``first`` on. Does nothing without angles."""
        if self.angles is None:
            return
        (angles,), retention = self.angles, self.spec.retention
        found = numbered(angles, self.starts, first, cos.shape[1] - first, retention.sinks, retention.page_size)
        for table, new in zip((cos, sin), found, strict=True):
            table[:, first:, : len(angles)] = new.to(table.dtype)

    @classmethod
    def of(cls, spec: CodecSpec, cos: Tensor, sin: Tensor) -> RotaryState:
        """The state of tokens with the tables ``cos`` and ``sin``, ``[B, T, p]``."""
        made = cls(spec, len(cos), 2 * cos.shape[2], cos.dtype, cos.device, cos.shape[1])
        none = length_tensor(0, cos.device)
        torch.ops.kvpass.append_rotary_(made.cos, made.sin, none, cos, sin, spec=str(spec))
        return made

    @staticmethod
    def _rows(spec: CodecSpec, tokens: int) -> int:
        """Number of table rows for ``tokens`` tokens."""
        return rows(tokens, spec.page_size) if spec.transform.page_rope else tokens

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("cos", self.cos), ("sin", self.sin))
        if self.starts is not None:
            yield "starts", self.starts

    def contents(self, n: int) -> dict[str, Tensor]:
        rows = self._rows(self.spec, n)
        return {name: tensor if name == "starts" else tensor[:, :rows] for name, tensor in self.tensors()}

    @torch.inference_mode(False)
    def free(self, n: int, gone: int) -> None:
        """Drop the rows of the ``gone`` tokens after the sinks that are freed (`KVState.free`) of ``n`` stored ones."""
        if self.starts is not None:
            self.starts -= gone
        size, sinks, most = self.spec.page_size, self.spec.retention.sinks, self.spec.retention.most or n
        kept, rows = (size, gone // size) if self.spec.transform.page_rope else (sinks, gone)
        room = self._rows(self.spec, most)
        for name in ("cos", "sin"):
            table = getattr(self, name)
            table[:, kept : table.shape[1] - rows] = table[:, kept + rows :].clone()
            table[:, table.shape[1] - rows :] = 0
        self._fill(self.cos.shape[1] - rows, self.cos, self.sin)
        if self.cos.shape[1] > room:
            self.put(cos=self.cos[:, :room].clone(), sin=self.sin[:, :room].clone())

    def _follows(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        for name in ("cos", "sin"):
            torch._dynamo.mark_dynamic(tensors[name], 1)
        return super()._follows(tensors)

    @torch.inference_mode(False)
    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens; contents are preserved."""
        have, need = self.cos.shape[1], self._rows(self.spec, tokens)
        if need > have:
            room = max(need, have + have // GROWTH + self._rows(self.spec, _LEAST_GROWTH))
            tables = {name: grown(table, room, 1) for name, table in (("cos", self.cos), ("sin", self.sin))}
            self._fill(have, **tables)
            self.put(**tables)
