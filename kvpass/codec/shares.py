"""Quantizes with calibrated bit widths: one water-filling over the whole model divides the bits by the cost of errors.

Bits are divided among layers, keys and values, heads, coordinates, and ranks of tokens. Pages hold all heads of a layer
(`codec.layer_pages`). The calibration gives each layer its share: the number of fields of every head.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import KVPassError
from ..fields import check_integers
from . import layer_pages
from .codec import Kept
from .layer_pages import LayerPages
from .spec import CodecSpec
from .transform_coding import DISTORTION, WIDEST, divided, fit_axes


def fit(x: Tensor, metric: Tensor, share: Tensor, spec: CodecSpec, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fit basis ``[B, H, D, b]`` float64 and widths ``[B, H, ranks, D]`` uint8 to tokens ``[B, H, T, D]``.

    metric: ``[1, H, D, b]``, the cost of errors.
    share: the layer's share, which fixes the number of fields of each kind.
    valid: ``[B, T]`` bool, False for padding, which is ignored.
    """
    size = Shares.of(spec).block_size
    metric = metric.unflatten(2, (-1, size)).expand(len(x), -1, -1, -1, -1)
    basis, cost = fit_axes(x, metric, size, valid)
    counts = share.diff(dim=-1).long().to(x.device)  # [ranks, 3, H]
    by_rank = [divided(cost, pairs, singles) for pairs, singles, _ in counts]
    return basis, torch.stack(by_rank, 2).to(torch.uint8)


def water_fill(cost: Tensor, bits: int, size: Tensor | None = None) -> Tensor:
    """Bit widths ``[...]`` uint8 that minimize the total error for a total of ``bits`` bits.

    Greedy: each bit goes to the coordinate whose error it reduces most. cost: ``[...]``, the error cost of each
    coordinate. size: ``[...]``, how much a bit of it counts towards ``bits``; default 1. Raises `KVPassError` if the
    coordinates cannot take that many bits.
    """
    saved = -torch.tensor(DISTORTION[: WIDEST + 1], dtype=torch.float64).diff()
    size = torch.ones_like(cost, dtype=torch.float64) if size is None else size.double()
    each = ((cost.double() / size).flatten().unsqueeze(-1) * saved).flatten()
    most = round(WIDEST * float(size.sum()))
    if not 0 <= bits <= most:
        raise KVPassError(f"{cost.numel()} coordinates take 0 to {most} bits, not {bits}.")
    order = each.sort(descending=True, stable=True).indices // WIDEST
    taken = order[size.flatten()[order].cumsum(0) <= bits + 1e-6]  # sums of sizes are rounded
    return torch.bincount(taken, minlength=cost.numel()).view(cost.shape).to(torch.uint8)


def page_bytes(share: Tensor, spec: CodecSpec) -> int:
    """Bytes per page of a layer with this share."""
    known = _page_bytes.setdefault(share, {})
    if spec not in known:
        known[spec] = layer_pages.page_bytes(share, spec)
    return known[spec]


_page_bytes: MutableMapping[Tensor, dict[CodecSpec, int]] = WeakIdKeyDictionary()  # each op asks for them in each step


@dataclass(frozen=True)
class Shares(LayerPages, name="shares"):
    """Per-channel bit widths, with a calibrated number of bits per head (`codec.shares`).

    block_size: number of neighbouring channels that are decorrelated together.
    ranked: give more bits to the half of a page's tokens whose errors would cost most under the calibration's queries.
    follows: take that half from the layer's keys.
    adapts: fit mean, basis and the bit widths within a head to the first packed tokens, under the calibrated metric.
        Otherwise all of them come from the calibration.
    """

    block_size: int
    ranked: bool = True
    follows: bool = False
    adapts: bool = False

    quantizes_with = ("share", *LayerPages.quantizes_with)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, block_size=1)
        if self.follows and not self.ranked:
            raise KVPassError("follows=True needs per-token bit widths: set ranked=True.")

    @property
    def dequantizes_any_bytes(self) -> bool:  # type: ignore[override]
        """Whether any bytes in pages can be dequantized: if bit widths do not come with the pages."""
        return not self.adapts

    def describe(self, quantizer: str) -> str:
        by = "per channel and token" if self.ranked else "per channel"
        return f"calibrated bit widths, {by}, blocks of {self.block_size}"

    def sequence(self, spec: CodecSpec) -> dict[str, Kept]:
        """With ``adapts``: ``basis`` ``[B, H, D, b]`` and ``widths`` ``[B, H, ranks, D]`` uint8."""
        return self.basis_and_widths if self.adapts else {}

    def model(self, spec: CodecSpec) -> tuple[str, ...]:
        """``share`` ``[ranks, 3, H + 1]`` int32 on the host; ``metric`` and ``basis`` ``[1, H, D, b]``, ``center``
        ``[1, H, 1, D]``, ``queries`` ``[1, H, Q, D]``, 16-bit; ``widths`` ``[1, H, ranks, D]`` uint8, and ``steps`` of
        the same shape, 16-bit: step sizes of the coordinates if their codes are entropy coded."""
        center = ("center",) if spec.transform.center else ()
        found = ("share", "metric") if self.adapts else ("share", *center, "basis", "widths", "steps")
        return (*found, "queries") if self.chooses else found

    def page_bytes(self, kept: Mapping[str, Tensor], heads: int, head_dim: int, spec: CodecSpec) -> int:
        return page_bytes(kept["share"], spec)

    def fit_tokens(self, kept: Mapping[str, Tensor], x: Tensor, valid: Tensor | None, spec: CodecSpec) -> None:
        if not self.adapts:
            return
        basis, widths = fit(x, kept["metric"], kept["share"], spec, valid)
        kept["basis"].copy_(basis)
        kept["widths"].copy_(widths)

    def opened(self, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[int, Tensor, Tensor, list[Tensor]]:
        share, basis, widths, *chosen = fitted
        return page_bytes(share, spec), basis, widths, chosen
