"""The tensors of a model that a calibration has fitted, for pages in a server's blocks.

A page needs nothing but its bytes and its number in the request: keys are rotated by the number of their page's middle
token, and mean, basis and bit widths belong to the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..codec.page_rope import PageTables, from_page_rope, mean_in_page, numbered, to_page_rope
from ..codec.spec import CodecSpec
from ..codec.tensors import of_model


@dataclass(frozen=True, eq=False)
class CalibratedLayer:
    """One layer's calibrated tensors, for the heads that a server's process has.

    key, value: by name (`codec.tensors.of_model`).
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
        named = (dict(zip(of_model(spec), of, strict=True)) for spec, of in zip(specs, (keys, values), strict=True))
        return cls(*specs, *named, angles)

    @property
    def page_bytes(self) -> tuple[int, int]:
        """Bytes per page of keys, and of values, of all heads together."""
        found = [
            spec.codec.page_bytes(tensors, spec) or 0
            for spec, tensors in ((self.key_spec, self.key), (self.value_spec, self.value))
        ]
        return found[0], found[1]

    @property
    def rope(self) -> str:
        """How keys are rotated (`codec.rope`); "" if they are stored as they come."""
        return self.key_spec.transform.numbered

    @cached_property
    def neighbours(self) -> PageTables | None:
        """Rotary tables ``[1, P, p]`` of the tokens of a page alone."""
        return None if self.angles is None else self._tables(self.angles.new_zeros(1, 0))

    @cached_property
    def mean(self) -> Tensor:
        """What is subtracted from keys, ``[1, H, P or 1, D]`` float32."""
        return mean_in_page(self.key["center"], self.neighbours, self.key_spec.page_size)

    def _tables(self, page: Tensor) -> PageTables:
        """The rotary tables of pages ``page`` ``[A, N]``, by their numbers in their requests."""
        assert self.angles is not None
        retention, size = self.key_spec.retention, self.key_spec.page_size
        none = torch.zeros(1, 1, dtype=torch.int64, device=page.device)
        beside = numbered(self.angles, none, 0, size, retention.sinks, size)
        first = retention.sinks + size // 2 + page * size
        turned = first.double().unsqueeze(-1) * self.angles.double()
        cos, sin = (
            torch.cat([one.expand(len(page), -1, -1), two], 1).float()
            for one, two in zip(beside, (turned.cos(), turned.sin()), strict=True)
        )
        return PageTables(cos, sin, self.rope)

    def middles(self, pages: int) -> PageTables:
        """Rotary tables ``[pages, p]`` float32 of the middle tokens of a request's first ``pages`` pages."""
        assert self.angles is not None
        found = self._tables(torch.arange(pages, device=self.angles.device)[None])
        size = self.key_spec.page_size
        return PageTables(found.cos[0, size:].contiguous(), found.sin[0, size:].contiguous(), found.rope)

    def to_pages(self, x: Tensor, page: Tensor) -> Tensor:
        """Rotated keys ``[A, H, N * P, D]`` as they are quantized, in their dtype. page: ``[A, N]``, numbers of their
        pages."""
        if self.angles is not None:
            x = to_page_rope(x, self._tables(page), 0, self.key_spec.page_size)
        return (x.float() - self._means(page)).to(x.dtype)

    def from_pages(self, x: Tensor, page: Tensor) -> Tensor:
        """Inverse of `to_pages`, for dequantized keys."""
        x = x + self._means(page)
        return x if self.angles is None else from_page_rope(x, self._tables(page), 0, self.key_spec.page_size)

    def _means(self, page: Tensor) -> Tensor:
        return self.mean if self.angles is None else self.mean.repeat(1, 1, page.shape[1], 1)
