"""KIVI (arXiv 2402.02750): keys per channel, values per token, recent tokens exact."""

from dataclasses import dataclass

from ..codec.quantizer import Subspace
from ..layout.retention import Recent, Sinks
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .uniform import UniformConfig


@register_scheme(
    kivi_1=dict(bits=1),
    kivi_3=dict(bits=3),
    kivi_4=dict(bits=4),
    kivi_8=dict(bits=8),
    kivi_pre=dict(rope="pre"),
    kivi_lsq=dict(fit="lsq"),
    kivi_sinks=dict(sinks=4),
    kivi_s8=dict(scale_bits=8),
    kivi_hqq=dict(fit="hqq"),
    kivi_128=dict(group_size=128, residual=128),
    kivi_paper=dict(value_page=4),
    logquant_twin=dict(retention=Sinks(1) + Recent(96, page_size=32)),
)
@dataclass(frozen=True, kw_only=True)
class KIVIConfig(UniformConfig):
    """bits: bit width, one of 1, 2, 3, 4, 8. The other fields are those of `UniformConfig`.

    "kivi-paper" packs values four at a time, so that nearly as few are exact as in the paper. "kivi-128" has the
    paper's groups and window of 128, 2.25 bits; where a head has fewer channels, a group of values is a head.
    """

    name = "kivi"

    bits: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._plan(None)  # an impossible config fails here, not at the first token

    def _plan(self, subspace: Subspace | None, value_head_dim: int | None = None) -> LayerPlan:
        group = min(self.group_size, value_head_dim or self.group_size)
        return LayerPlan(self.key(self.bits, subspace=subspace), self.value(self.bits, group_size=group))

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan(None, layer.value_head_dim).checked(layer)
