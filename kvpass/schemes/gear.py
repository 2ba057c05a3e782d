"""GEAR (arXiv 2403.05527): KIVI's quantization, exact outliers, and a low-rank matrix of the quantization error."""

from dataclasses import dataclass

from ..codec.error_term import ErrorTerm
from ..fields import check_integers
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .kivi import KIVIConfig


@register_scheme(gear_l=dict(share=0.0), gear_4=dict(bits=4))
@dataclass(frozen=True, kw_only=True)
class GEARConfig(KIVIConfig):
    """KIVI's fields, and ``bits + 32 / group_size + 32 * share + 16 * rank * (1 / head_dim + 1 / residual)`` bits per
    value.

    share: fraction of a page's values kept exactly (s of the paper, 2 %).
    rank: rank of the error matrices (r of the paper). Here they cover pages of ``residual`` tokens. The paper fits one
        to the whole prompt and then one to every 20 tokens, so for long prompts it spends fewer bits on them.

    ``share=0`` is the paper's GEAR-L.
    """

    name = "gear"

    group_size: int = 64
    residual: int = 64
    share: float = 0.02
    rank: int = 2

    def __post_init__(self) -> None:
        check_integers(self, rank=0)
        super().__post_init__()
        self._coded()

    def _coded(self) -> LayerPlan:
        codec = ErrorTerm(self.share, self.rank)
        return LayerPlan(self.key(self.bits, codec=codec), self.value(self.bits, codec=codec))

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._coded().checked(layer)
