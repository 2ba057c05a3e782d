"""KVQuant (arXiv 2401.18079): keys before rotary embedding and per channel, fitted datatypes, 1 % of values exact."""

from dataclasses import dataclass
from typing import Literal

from ..codec.datatype import CalibratedDatatype
from ..codec.nuq import PageDatatype
from ..codec.quantizer import Quantizer
from ..codec.spec import CodecSpec
from .base import LayerGeometry, LayerPlan, register_scheme
from .kivi import KIVIConfig
from .storage import StorageConfig


@register_scheme(kvquant_3=dict(bits=3), kvquant_4=dict(bits=4))
@dataclass(frozen=True, kw_only=True)
class KVQuantConfig(KIVIConfig):
    """KIVI's fields, up to 4 bits, and ``bits + 32 / group_size + 32 * share + 2**(bits + 4) / (residual * head_dim)``
    bits a value; a value has no more channels in its group than the head has.

    share: of the values of a page, those kept exactly.

    Everything is fitted to pages as they are packed. The paper calibrates, as `CalibratedKVQuantConfig` does: datatypes
    for each layer, weighted by the gradients of its loss, and ranges of key channels, so that keys need no scales.
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
        codec = PageDatatype(self.share)
        value = self.value(self.bits, group_size=min(self.group_size, head_dim), codec=codec)
        return LayerPlan(self.key(self.bits, codec=codec), value)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._of_heads(layer.head_dim).checked(layer)


@register_scheme(kvquant_calibrated_3=dict(bits=3), kvquant_calibrated_4=dict(bits=4))
@dataclass(frozen=True, kw_only=True)
class CalibratedKVQuantConfig(StorageConfig):
    """What the paper calibrates, `kvpass.calibrate` finds: for each layer a datatype of keys and one of values, and a
    range for every channel of keys. Keys take ``bits + 32 * share``, values ``bits + 32 / head_dim + 32 * share`` bits
    a value, ranges and datatypes some hundred bytes a layer in every cache.

    bits: 1 to 4.
    share: of the values of a page, those kept exactly: of keys those farthest beyond the calibrated ranges, of values
        those farthest from the middle of their token. Of the calibrated tokens, as large a share is beyond the range.
    weighted: whether datatypes are weighted by squared gradients of the loss (section 3.3, eq. 3).
    normalized: whether the points of a datatype are given the mean and deviation of what they stand for (Q-Norm,
        section 3.6).

    A page has room for as many outliers as its share, where the paper takes all that are beyond; a token of values is
    one of a head, where the paper takes all heads of a layer.
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

    def _of_heads(self, head_dim: int) -> LayerPlan:
        codec = CalibratedDatatype(self.share)
        key, value = self.key_retention(), self.value_retention()
        return LayerPlan(
            CodecSpec(Quantizer(self.bits, "channel", key.page_size, codec=codec), key, self.key_transform()),
            CodecSpec(Quantizer(self.bits, "token", head_dim, codec=codec), value),
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._of_heads(layer.head_dim).checked(layer)
