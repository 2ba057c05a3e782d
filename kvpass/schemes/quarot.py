"""QuaRot's KV cache: round to nearest, per token, after a random-sign Hadamard rotation of each head."""

from dataclasses import dataclass, replace

from ..codec.transform import Transform
from ..fields import check_integers
from .base import LayerPlan, register_scheme
from .rtn import RTNConfig


@register_scheme(quarot_2=dict(bits=2), quarot_3=dict(bits=3))
@dataclass(frozen=True, kw_only=True)
class QuaRotConfig(RTNConfig):
    """RTN's fields, the seed of the signs, and ``center``: subtract the mean of the first packed keys."""

    name = "quarot"

    seed: int = 0
    center: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, seed=0)

    def _plan(self) -> LayerPlan:
        key, value = self.key(self.bits, per="token"), self.value(self.bits)
        return LayerPlan(
            replace(key, transform=self.key_transform(center=self.center, rotation=self.seed)),
            replace(value, transform=Transform(rotation=self.seed)),
        )
