"""KVQuant (arXiv 2401.18079): keys before rotary embedding and per channel, fitted datatypes, 1 % of values exact."""

from dataclasses import dataclass
from typing import Literal

from ..codec.datatype import CalibratedDatatype
from ..codec.nuq import PageDatatype
from ..codec.quantizer import Quantizer
from ..codec.spec import CodecSpec
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .kivi import KIVIConfig
from .storage import StorageConfig


@register_scheme(kvquant_3=dict(bits=3), kvquant_4=dict(bits=4))
@dataclass(frozen=True, kw_only=True)
class KVQuantConfig(KIVIConfig):
    """KIVI's fields, with up to 4 bits, and ``bits + 32 / group_size + 32 * share + 2**(bits + 4) / (residual *
    head_dim)`` bits per value. A group of values spans at most one head.

    share: fraction of a page's values kept exactly.

    Everything is fitted to each page as it is packed. The paper calibrates ahead, as `CalibratedKVQuantConfig` does: a
    datatype for each layer, weighted by gradients of the loss, and ranges of key channels, so that keys need no scales.
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

    def _of_heads(self, value_head_dim: int) -> LayerPlan:
        codec = PageDatatype(self.share)
        value = self.value(self.bits, group_size=min(self.group_size, value_head_dim), codec=codec)
        return LayerPlan(self.key(self.bits, codec=codec), value)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._of_heads(layer.value_head_dim).checked(layer)


@register_scheme(kvquant_calibrated_3=dict(bits=3), kvquant_calibrated_4=dict(bits=4))
@dataclass(frozen=True, kw_only=True)
class CalibratedKVQuantConfig(StorageConfig):
    """KVQuant as in the paper, with what `kvpass.calibrate` finds: for each layer a datatype of keys and one of values,
    and a range for every key channel. Keys take ``bits + 32 * share`` bits per value, values ``bits + 32 / head_dim +
    32 * share``. Ranges and datatypes take some hundred bytes per layer in every cache.

    bits: 1 to 4.
    share: fraction of a page's values kept exactly. For keys, those farthest outside the calibrated ranges; for values,
        those farthest from the middle of their token. The ranges leave out the same fraction of the calibration tokens.
    weighted: whether datatypes are weighted by squared gradients of the loss (section 3.3, eq. 3).
    normalized: whether the points of a datatype are shifted and scaled to the mean and deviation of the data (Q-Norm,
        section 3.6).

    A page has room for a fixed number of outliers, its share; the paper keeps all values outside the ranges. A token of
    values is that of one head; the paper takes all heads of a layer together.
    """

    name = "kvquant-calibrated"
    needs_calibration = takes_calibration = True

    bits: int = 2
    sinks: int = 1
    rope: Literal["post", "pre"] = "pre"
    share: float = 0.01
    weighted: bool = True
    normalized: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_heads(64)

    def _of_heads(self, value_head_dim: int) -> LayerPlan:
        codec = CalibratedDatatype(self.share)
        key, value = self.key_retention(), self.value_retention()
        return LayerPlan(
            CodecSpec(Quantizer(self.bits, "channel", key.page_size, codec=codec), key, self.key_transform()),
            CodecSpec(Quantizer(self.bits, "token", value_head_dim, codec=codec), value),
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._of_heads(layer.value_head_dim).checked(layer)
