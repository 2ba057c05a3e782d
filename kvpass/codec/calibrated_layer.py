"""The tensors of a model that a calibration has fitted, for pages outside of a cache: in a server's blocks and stores.

A page needs nothing but its bytes and the number of its middle token, by which its keys are rotated. Mean, basis and
bit widths belong to the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .page_rope import PageTables, from_page_rope, mean_in_page, middle, to_page_rope
from .spec import CodecSpec
from .tensors import of_model


@dataclass(frozen=True, eq=False)
class CalibratedLayer:
    """One layer's calibrated tensors, for the heads that a process has.

    key, value: by name (`codec.tensors.of_model`), ``[L, ...]``; L is 1, or the number of layers with the same specs.
    angles: ``[p]``, the rotation of each channel pair from one token to the next, if keys have page-relative RoPE.
    """

    key_spec: CodecSpec
    value_spec: CodecSpec
    key: dict[str, Tensor]
    value: dict[str, Tensor]
    angles: Tensor | None

    @classmethod
    def of(
        cls, specs: tuple[CodecSpec, CodecSpec], tensors: tuple[Sequence[Tensor], Sequence[Tensor]]
    ) -> "CalibratedLayer":
        """The tensors of a layer as a calibration lists them (`kvpass.schemes.calibrated.Calibration`)."""
        keys, values = (list(one) for one in tensors)
        angles = keys.pop(0) if specs[0].transform.numbered else None
        key, value = (
            dict(zip(of_model(spec), of, strict=True)) for spec, of in zip(specs, (keys, values), strict=True)
        )
        return cls(*specs, key, value, angles)

    @property
    def page_bytes(self) -> tuple[int, int]:
        """Bytes per page of keys, and of values, of all heads together."""
        found = []
        for spec, tensors in ((self.key_spec, self.key), (self.value_spec, self.value)):
            _, heads, _, head_dim = tensors["widths"].shape
            found.append(spec.codec.page_bytes(tensors, heads, head_dim, spec))
        return found[0], found[1]

    @property
    def rope(self) -> str:
        """How keys are rotated (`codec.rope`); "" if they are stored as they come."""
        return self.key_spec.transform.numbered

    @cached_property
    def neighbours(self) -> PageTables | None:
        """Rotary tables ``[L, P, p]`` of the tokens of a page alone."""
        return None if self.angles is None else self._tables(self.angles.new_empty(len(self.key["center"]), 0))

    @cached_property
    def mean(self) -> Tensor:
        """What is subtracted from keys, ``[L, H, P or 1, D]`` float32."""
        return mean_in_page(self.key["center"], self.neighbours, self.key_spec.page_size)

    def turned(self, tokens: Tensor) -> PageTables:
        """Rotary tables ``[..., p]`` float32 of ``tokens`` ``[...]``, by their numbers."""
        assert self.angles is not None
        angles = tokens.double().unsqueeze(-1) * self.angles.double()
        return PageTables(angles.cos().float(), angles.sin().float(), self.rope)

    def _tables(self, middles: Tensor) -> PageTables:
        """Rotary tables of a page's tokens, then of ``middles``: ``[A, P + N, p]``."""
        tokens = torch.arange(self.key_spec.page_size, device=middles.device).expand(len(middles), -1)
        return self.turned(torch.cat([tokens, middles], 1))

    def middles(self, page: Tensor) -> Tensor:
        """The numbers of the middle tokens of pages ``page``, by their numbers in a cache."""
        size = self.key_spec.page_size
        return self.key_spec.retention.sinks + page * size + middle(size)

    def to_pages(self, x: Tensor, middles: Tensor) -> Tensor:
        """Rotated keys ``[A, H, N * P, D]`` as they are quantized, in their dtype. middles: ``[A, N]``, the number of
        each page's middle token."""
        if self.angles is not None:
            x = to_page_rope(x, self._tables(middles), 0, self.key_spec.page_size)
        return (x.float() - self._means(middles)).to(x.dtype)

    def from_pages(self, x: Tensor, middles: Tensor) -> Tensor:
        """Inverse of `to_pages`, for dequantized keys."""
        x = x + self._means(middles)
        return x if self.angles is None else from_page_rope(x, self._tables(middles), 0, self.key_spec.page_size)

    def _means(self, middles: Tensor) -> Tensor:
        return self.mean if self.angles is None else self.mean.repeat(1, 1, middles.shape[1], 1)
