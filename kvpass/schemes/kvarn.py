"""KVarN (arXiv 2606.03458): rotated pages whose tokens and channels are scaled to equal size before rounding."""

from dataclasses import dataclass, replace

from ..codec.balance import Sinkhorn
from ..codec.quantizer import Quantizer
from ..codec.spec import CodecSpec
from ..codec.transform import Transform
from ..fields import check_integers
from ..layout.retention import Retention
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .storage import StorageConfig


@register_scheme(
    kvarn_k2v2=dict(key_bits=2), kvarn_k4v2_g128=dict(residual=128), kvarn_k2v2_g128=dict(key_bits=2, residual=128)
)
@dataclass(frozen=True, kw_only=True)
class KVarNConfig(StorageConfig):
    """Keys take ``bits + 32 / residual + 16 / head_dim`` bits per value, values ``bits + 32 / head_dim + 16 /
    residual``.

    residual: tokens of a tile (64 or 128 in the official code), which are packed together; the windows of keys and
        values hold up to ``residual - 1`` tokens.
    key_bits, value_bits: bit widths. Keys are quantized per channel of a tile, values per token.
    seed: seed of the signs of the rotation.

    The official code rotates without signs, and keeps the first tile and a tail of recent ones exact; use ``sinks`` and
    ``retention`` for that.
    """

    name = "kvarn"

    residual: int = 64
    key_bits: int = 4
    value_bits: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, key_bits=1, value_bits=1, seed=0)
        self._plan(64)

    def _policy(self) -> Retention:
        return self.retention or Retention(self.residual, self.residual, self.sinks)

    def _plan(self, value_head_dim: int) -> LayerPlan:
        keys = self.key_retention()
        key = Quantizer(self.key_bits, "channel", keys.page_size, codec=Sinkhorn())
        value = replace(key, bits=self.value_bits, per="token", group_size=value_head_dim)
        return LayerPlan(
            CodecSpec(key, keys, self.key_transform(rotation=self.seed)),
            CodecSpec(value, self.value_retention(), Transform(rotation=self.seed)),
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan(layer.value_head_dim).checked(layer)
