"""Full-precision pages: nothing is lost, so that all that is left to test is the plumbing, or a policy that evicts."""

from dataclasses import dataclass

from ..codec.spec import CodecSpec
from ..layout.retention import POLICIES
from .base import LayerGeometry, LayerPlan, register_scheme
from .storage import StorageConfig


@register_scheme(h2o=dict(retention=POLICIES["h2o"]), streaming_llm=dict(retention=POLICIES["streaming-llm"]))
@dataclass(frozen=True, kw_only=True)
class IdentityConfig(StorageConfig):
    """The fields of `StorageConfig`."""

    name = "identity"

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        bits = 8 * layer.dtype.itemsize
        return LayerPlan(
            CodecSpec(bits, "token", 1, **self.key_storage()), CodecSpec(bits, "token", 1, **self.value_storage())
        ).checked(layer)
