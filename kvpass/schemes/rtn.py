"""Round to nearest, per token: the simplest baseline (transformers' QuantizedCache with the quanto backend)."""

from dataclasses import dataclass

from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .uniform import UniformConfig


@register_scheme(rtn_2=dict(bits=2), rtn_3=dict(bits=3))
@dataclass(frozen=True, kw_only=True)
class RTNConfig(UniformConfig):
    """Keys and values per token. bits: bit width; the other fields are those of `UniformConfig`."""

    name = "rtn"

    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._plan()  # an impossible config fails here, not at the first token

    def _plan(self) -> LayerPlan:
        return LayerPlan(self.key(self.bits, per="token"), self.value(self.bits))

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan().checked(layer)
