"""Unquantized pages: lossless, to test an eviction policy or everything around quantization."""

from dataclasses import dataclass

from ..codec.quantizer import Quantizer
from ..codec.spec import CodecSpec
from ..layout.retention import POLICIES
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .storage import StorageConfig


@register_scheme(h2o=dict(retention=POLICIES["h2o"]), streaming_llm=dict(retention=POLICIES["streaming-llm"]))
@dataclass(frozen=True, kw_only=True)
class IdentityConfig(StorageConfig):
    """The fields of `StorageConfig`."""

    name = "identity"

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        floats = Quantizer(8 * layer.dtype.itemsize, "token", 1)
        return LayerPlan(
            CodecSpec(floats, self.key_retention(), self.key_transform()), CodecSpec(floats, self.value_retention())
        ).checked(layer)
