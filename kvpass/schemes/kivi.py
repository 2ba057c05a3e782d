"""KIVI (arXiv 2402.02750): keys per channel, values per token, recent tokens exact."""

from dataclasses import dataclass

from ..codec.quantizer import Subspace
from ..layout.retention import Recent, Sinks
from .base import LayerGeometry, LayerPlan, register_scheme
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
    logquant_twin=dict(retention=Sinks(1) + Recent(96, page_size=32)),
)
@dataclass(frozen=True, kw_only=True)
class KIVIConfig(UniformConfig):
    """bits: bit width, one of 1, 2, 3, 4, 8. The other fields are those of `UniformConfig`."""

    name = "kivi"

    bits: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._plan(None)  # an impossible config fails here, not at the first token

    def _plan(self, subspace: Subspace | None) -> LayerPlan:
        return LayerPlan(self.key(self.bits, subspace=subspace), self.value(self.bits))

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan(None).checked(layer)
