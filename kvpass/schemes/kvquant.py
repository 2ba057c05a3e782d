"""KVQuant (arXiv 2401.18079): keys before rotary embedding and per channel, fitted datatypes, 1 % of values exact."""

from dataclasses import dataclass
from typing import Any, Literal

from .base import LayerGeometry, LayerPlan, register_scheme
from .kivi import KIVIConfig


@register_scheme(kvquant_3=dict(bits=3), kvquant_4=dict(bits=4))
@dataclass(frozen=True, kw_only=True)
class KVQuantConfig(KIVIConfig):
    """KIVI's fields, up to 4 bits, and ``bits + 32 / group_size + 32 * share + 2**(bits + 4) / (residual * head_dim)``
    bits a value; a value has no more channels in its group than the head has.

    share: of the values of a page, those kept exactly.

    Everything is fitted to pages as they are packed. The paper calibrates: datatypes for each layer, weighted by the
    gradients of its loss, and ranges of key channels, so that keys need no scales of their own and no window.
    """

    name = "kvquant"

    group_size: int = 64
    residual: int = 64
    sinks: int = 1
    rope: Literal["post", "pre"] = "pre"
    share: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_heads(self.group_size)

    def _of_heads(self, head_dim: int) -> LayerPlan:
        fields: dict[str, Any] = dict(codec="nuq", share=self.share)
        value = self.value(self.bits, group_size=min(self.group_size, head_dim), **fields)
        return LayerPlan(self.key(self.bits, **fields), value)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._of_heads(layer.head_dim).checked(layer)
