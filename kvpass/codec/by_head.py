"""Divides the bits of a layer among its heads by what the prompt's attention shows.

Some heads recall: they put large weights on few tokens, far back. An error in such a token costs most, because the
squared error of attention's output grows with the square of the weight. So each head's bits depend on its
*concentration*: the sum of the squared weights that a query of the prompt puts on tokens outside the window. It needs
no calibration, and every layer has as many bits as without it.

Pages hold all heads of a layer (`codec.layer_pages`), and all have the same size, because the bit pairs of a layer are
divided among its heads. Every head has equally many single bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KVPassError
from .allocation import Allocation
from .codec import Kept
from .layer_pages import LayerPages
from .probes import PROBES
from .spec import CodecSpec
from .transform_coding import DISTORTION, FIELD_BITS, PAIRS, divided, fit_axes

_CONCENTRATION = Kept(lambda spec, head_dim: (1, 2), torch.float32)
_LEAST = 1e-6
_TEMPER = 0.5  # exponent of the cost of a head: later queries may attend to other heads than the prompt's


def pairs_by_head(cost: Tensor, pairs: int) -> Tensor:
    """Numbers of bit pairs ``[B, H]`` that divide ``pairs * H`` by error costs ``[B, H, D]``; at least one each.

    Greedy: each pair goes to the coordinate whose error it reduces most.
    """
    heads = cost.shape[1]
    saved = -torch.tensor(DISTORTION[:: FIELD_BITS[0]][: PAIRS + 1], dtype=cost.dtype, device=cost.device).diff()
    each = cost.unsqueeze(-1) * saved  # [B, H, D, PAIRS]
    first = torch.zeros_like(each).scatter(2, each[..., :1].argmax(2, keepdim=True), torch.inf)
    taken = torch.maximum(each, first).flatten(1).topk(pairs * heads, -1).indices // each[0, 0].numel()
    return torch.zeros_like(cost[..., 0], dtype=torch.long).scatter_add(-1, taken, torch.ones_like(taken))


@dataclass(frozen=True)
class ByHead(LayerPages, Allocation, name="by_head"):
    """`Allocation`, with the bits of a layer divided among its heads by the prompt's attention (`codec.by_head`)."""

    quantizes_with = LayerPages.quantizes_with
    dequantizes_with = LayerPages.dequantizes_with

    @property
    def from_keys(self) -> tuple[str, ...]:
        return ("concentration",) if self.follows else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ranked:
            raise KVPassError("Bits by head need per-token bit widths: set rich_pairs and rich_singles.")

    @property
    def needs_concentration(self) -> bool:
        """Whether the codec is fitted to how concentrated the prompt's attention is."""
        return self.chooses

    def describe(self, quantizer: str) -> str:
        return f"{self.bits:g} bits on average, per channel, token and head, blocks of {self.block_size}"

    def sequence(self, spec: CodecSpec) -> dict[str, Kept]:
        """``basis`` ``[B, H, D, b]``, which holds the error metric until the basis is fitted; ``widths``
        ``[B, H, ranks, D]`` uint8; for keys ``queries``, which select the tokens that get more bits, and
        ``concentration`` ``[B, H, 1, 2]`` float32."""
        of_keys = {"queries": PROBES, "concentration": _CONCENTRATION} if self.chooses else {}
        return {**self.basis_and_widths, **of_keys}

    def page_bytes(self, kept: Mapping[str, Tensor], heads: int, head_dim: int, spec: CodecSpec) -> int:
        _, of_head = Allocation.tensors["codes"].shape(spec, head_dim)  # heads have as many fields on average
        return heads * of_head

    def fit_queries(self, kept: Mapping[str, Tensor], q: Tensor | None, valid: Tensor | None, spec: CodecSpec) -> None:
        super().fit_queries(kept, q, valid, spec)
        if self.chooses:
            kept["concentration"].zero_()

    def fit_tokens(self, kept: Mapping[str, Tensor], x: Tensor, valid: Tensor | None, spec: CodecSpec) -> None:
        basis, cost = fit_axes(x, kept["basis"].unflatten(2, (-1, self.block_size)), self.block_size, valid)
        of_heads = self.cost_of_heads(cost, kept["concentration"])
        by_rank = [
            divided(cost, pairs_by_head(of_heads, pairs), torch.tensor(singles, device=x.device))
            for pairs, singles in self.counts(x.shape[-1])
        ]
        kept["basis"].copy_(basis)
        kept["widths"].copy_(torch.stack(by_rank, 2))

    def cost_of_heads(self, cost: Tensor, concentration: Tensor) -> Tensor:
        """Error costs ``[B, H, D]`` that compare heads, from those within heads and the ``concentration``
        ``[B, H, 1, 2]``."""
        weights, energy = concentration.double().squeeze(2).unbind(-1)
        worth = weights * (1 if self.follows else energy)
        mean = cost.log().mean(-1).exp()
        level = worth * mean
        level = level / level.mean(-1, keepdim=True)  # NaN without attention to packed tokens: all heads are alike
        return cost / mean.unsqueeze(-1) * (level.nan_to_num(1.0).clamp_min(_LEAST) ** _TEMPER).unsqueeze(-1)

    def opened(self, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[int, Tensor, Tensor, list[Tensor]]:
        basis, widths, *chosen = fitted
        _, heads, _, head_dim = widths.shape
        return self.page_bytes({}, heads, head_dim, spec), basis, widths, chosen
