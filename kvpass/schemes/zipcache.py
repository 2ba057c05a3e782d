"""ZipCache (arXiv 2405.14256): keys per channel, values per token after a scale for each channel, salient tokens at
twice the bits."""

from dataclasses import dataclass

from ..codec.balance import ChannelSeparable
from ..codec.salient import Salient
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .kivi import KIVIConfig


@register_scheme(zipcache_4=dict(bits=4), zipcache_salient=dict(share=0.5, residual=128))
@dataclass(frozen=True, kw_only=True)
class ZipCacheConfig(KIVIConfig):
    """KIVI's fields. Values take ``bits + 32 / head_dim + 16 / residual`` bits: each channel of a page is divided by
    the square root of its largest value, and each token has one scale (section 4.1). ``group_size`` applies to keys.

    share: fraction of a page's tokens that get ``2 * bits``: the most salient ones, which receive the most attention
        from some of the prompt's queries (section 4.2, `codec.salient`). Keys then take ``bits * (1 + share) + 64 /
        residual + 1 / head_dim`` bits per value, values ``bits * (1 + share) + 33 / head_dim + 32 / residual``; a group
        of keys is all tokens of a page with the same bit width. 0 treats all tokens alike.

    Channels are normalized in every page; the paper does so once, for the prompt and all heads of a token. The same
    number of tokens is salient in every page, judged by probe queries of the prompt; the paper ranks all tokens, and
    again after every 100 decoded ones.
    """

    name = "zipcache"

    share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_heads(self.group_size)

    def _of_heads(self, value_head_dim: int) -> LayerPlan:
        if not self.share:
            value = self.value(self.bits, codec=ChannelSeparable(), group_size=value_head_dim)
            return LayerPlan(self.key(self.bits), value)
        page_size = self.key_retention().page_size
        key = self.key(self.bits, group_size=page_size, codec=Salient(self.share, "queries"))
        return LayerPlan(key, self.value(self.bits, group_size=value_head_dim, codec=Salient(self.share, "keys")))

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._of_heads(layer.value_head_dim).checked(layer)
