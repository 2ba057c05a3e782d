"""Rotate heads until they are nearly normal, and quantize them to the E8 lattice, as QuIP# (arXiv 2402.04396) does with
weights."""

from dataclasses import dataclass

from ..codec.lattice import E8
from ..codec.quantizer import Quantizer
from ..codec.spec import CodecSpec
from ..codec.transform import Transform
from ..fields import check_integers
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .storage import StorageConfig


@register_scheme(e8_sinks=dict(sinks=4))
@dataclass(frozen=True, kw_only=True)
class E8Config(StorageConfig):
    """``2 + 16 / head_dim`` bits per value, plus the exact tokens of `StorageConfig`.

    center: subtract the mean of the first packed keys from all keys; None does so if there are sinks.
    seed: seed of the signs of the rotation.
    """

    name = "e8"

    center: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, seed=0)
        self._plan(64, 64)

    def _plan(self, head_dim: int, value_head_dim: int) -> LayerPlan:
        keys = self.key_retention()
        center = keys.sinks > 0 if self.center is None else self.center
        return LayerPlan(
            CodecSpec(
                Quantizer(2, "token", head_dim, codec=E8()), keys,
                self.key_transform(center=center, rotation=self.seed),
            ),
            CodecSpec(
                Quantizer(2, "token", value_head_dim, codec=E8()), self.value_retention(),
                Transform(rotation=self.seed),
            ),
        )  # fmt: skip

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan(layer.head_dim, layer.value_head_dim).checked(layer)
