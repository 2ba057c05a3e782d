"""Round to nearest, per token: the simplest baseline (transformers' QuantizedCache with the quanto backend)."""

from dataclasses import dataclass

from ..codec.across_heads import across_heads
from ..errors import KVPassError
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .uniform import UniformConfig


@register_scheme(rtn_2=dict(bits=2), rtn_3=dict(bits=3))
@dataclass(frozen=True, kw_only=True)
class RTNConfig(UniformConfig):
    """Keys and values per token. The other fields are those of `UniformConfig`.

    bits: bit width.
    across_heads: groups cross the heads of a token; a group has ``group_size`` of its channels, or all if there are
        fewer. Pages are then dequantized before attention, and such a cache cannot evict tokens.
    """

    name = "rtn"

    bits: int = 4
    group_size: int = 64
    across_heads: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.across_heads and self.scale_bits != 16:
            raise KVPassError("Groups across heads have 16-bit scales: leave out scale_bits or across_heads.")
        self._plan()  # an impossible config fails here, not at the first token

    def _plan(self) -> LayerPlan:
        return LayerPlan(self.key(self.bits, per="token"), self.value(self.bits))

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        plan = self._plan()
        if self.across_heads:
            of_keys, of_values = layer.heads
            plan = LayerPlan(across_heads(plan.key, *of_keys), across_heads(plan.value, *of_values))
        return plan.checked(layer)
