"""PolarQuant (arXiv 2502.00527): keys as radii and angles of the channel pairs that rotary embedding rotates."""

from dataclasses import dataclass

from ..codec.polar import Polar
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .kivi import KIVIConfig


@register_scheme(polarquant_3=dict(bits=3), polarquant_4=dict(bits=4))
@dataclass(frozen=True, kw_only=True)
class PolarQuantConfig(KIVIConfig):
    """KIVI's fields, with groups of 128 tokens as in the paper; keys take ``bits + 32 / group_size`` bits per value.

    For a pair of key channels ``(x, y)``, the radius ``sqrt(x**2 + y**2)`` and the angle ``atan2(y, x)`` are quantized
    to ``bits`` bits each (n = m of the paper), within the range of their channel in a group of tokens. A group of
    values spans at most one head. Quantized values stand for points from one end of the range to the other; in the
    paper they stand for the middles of cells. Pairs are ``(i, i + D / 2)``. A model whose rotary embedding rotates
    other pairs still runs, but the paper's argument about arcs does not hold for it.
    """

    name = "polarquant"

    bits: int = 4
    group_size: int = 128
    residual: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_heads(self.group_size)

    def _of_heads(self, value_head_dim: int) -> LayerPlan:
        return LayerPlan(
            self.key(self.bits, codec=Polar()), self.value(self.bits, group_size=min(self.group_size, value_head_dim))
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._of_heads(layer.value_head_dim).checked(layer)
