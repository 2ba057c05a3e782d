"""PolarQuant (arXiv 2502.00527): keys as radii and angles of the channel pairs that rotary embedding rotates."""

from dataclasses import dataclass

from ..codec.polar import Polar
from .base import LayerGeometry, LayerPlan, register_scheme
from .kivi import KIVIConfig


@register_scheme(polarquant_3=dict(bits=3), polarquant_4=dict(bits=4))
@dataclass(frozen=True, kw_only=True)
class PolarQuantConfig(KIVIConfig):
    """KIVI's fields, groups of 128 tokens as in the paper, and its values; keys take ``bits + 32 / group_size`` bits a
    value: of a pair of channels ``(x, y)`` the radius ``sqrt(x**2 + y**2)`` and the angle ``atan2(y, x)`` have codes of
    ``bits`` bits each (n = m of the paper), both under the range of their channel in a group of tokens.

    A value has no more channels in its group than the head has. Codes stand for points of the range and its ends, those
    of the paper for the middle of cells. Of a model whose rotary embedding turns other pairs than ``(i, i + D / 2)``
    these are not its own, and what is said of arcs is not true.
    """

    name = "polarquant"

    bits: int = 4
    group_size: int = 128
    residual: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_heads(self.group_size)

    def _of_heads(self, head_dim: int) -> LayerPlan:
        return LayerPlan(
            self.key(self.bits, codec=Polar()), self.value(self.bits, group_size=min(self.group_size, head_dim))
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._of_heads(layer.head_dim).checked(layer)
