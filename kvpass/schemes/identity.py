"""Full-precision pages: nothing is lost, so that all that is left to test is the plumbing."""

from dataclasses import dataclass

from .base import LayerGeometry, LayerPlan, register_scheme
from .uniform import UniformConfig


@register_scheme()
@dataclass(frozen=True, kw_only=True)
class IdentityConfig(UniformConfig):
    """The fields of `UniformConfig`, of which ``fit`` and ``eta`` mean nothing here."""

    name = "identity"

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        bits = 8 * layer.dtype.itemsize
        return LayerPlan(self.key(bits), self.value(bits)).checked(layer)
