"""Kitty (arXiv 2511.18643): KIVI's quantization, with twice the bits for the largest channels of each key page."""

from dataclasses import dataclass

from ..codec.boost import Boosted
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .kivi import KIVIConfig


@register_scheme(kitty_25=dict(share=0.25))
@dataclass(frozen=True, kw_only=True)
class KittyConfig(KIVIConfig):
    """KIVI's fields, with pages, groups and sinks of the official code. Keys take ``bits * (1 + share) + 32 /
    group_size + 16 * share / residual`` bits per value.

    share: fraction of a head's channels, those with the largest keys in the page on average, that get ``2 * bits``.

    A group of values spans at most one head. The paper ranks channels by sensitivity; its code, and this one, by mean
    magnitude.
    """

    name = "kitty"

    group_size: int = 128
    residual: int = 128
    sinks: int = 32
    share: float = 0.125

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_heads(self.group_size)

    def _of_heads(self, value_head_dim: int) -> LayerPlan:
        value = self.value(self.bits, group_size=min(self.group_size, value_head_dim))
        return LayerPlan(self.key(self.bits, codec=Boosted(self.share)), value)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._of_heads(layer.value_head_dim).checked(layer)
