"""ZipCache's quantizers (arXiv 2405.14256): keys per channel, values per token behind a scale for each channel."""

from dataclasses import dataclass

from ..codec.spec import CodecSpec
from .base import LayerGeometry, LayerPlan, register_scheme
from .kivi import KIVIConfig


@register_scheme(zipcache_4=dict(bits=4))
@dataclass(frozen=True, kw_only=True)
class ZipCacheConfig(KIVIConfig):
    """KIVI's fields. Values take ``bits + 32 / head_dim + 16 / residual`` bits: each channel of a page is divided by
    the root of its largest value, and a token has one scale (section 4.1), where ``group_size`` is that of keys.

    Channels are normalised in every page, where the paper does it once for a prompt and tokens of all heads; all tokens
    have one width: the paper's saliency, which gives some of them more bits, is not here (`QAQConfig` has such widths).
    """

    name = "zipcache"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._value(self.group_size)

    def _value(self, head_dim: int) -> CodecSpec:
        return self.value(self.bits, codec="channel-separable", group_size=head_dim)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return LayerPlan(self.key(self.bits), self._value(layer.head_dim)).checked(layer)
