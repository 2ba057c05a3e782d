"""Full-precision pages: nothing is lost, so that all that is left to test is the plumbing."""

from dataclasses import dataclass

from ..codec.spec import CodecSpec
from .base import LayerGeometry, LayerPlan, register_scheme
from .storage import StorageConfig


@register_scheme()
@dataclass(frozen=True, kw_only=True)
class IdentityConfig(StorageConfig):
    """The fields of `StorageConfig`."""

    name = "identity"

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        bits = 8 * layer.dtype.itemsize
        return LayerPlan(
            CodecSpec(bits, "token", 1, **self.key_storage()), CodecSpec(bits, "token", 1, **self.value_storage())
        ).checked(layer)
