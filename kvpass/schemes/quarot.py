"""QuaRot's KV cache: round to nearest, per token, after a random-sign Hadamard rotation of each head."""

from dataclasses import dataclass

from ..codec.spec import check_integers
from .base import LayerPlan, register_scheme
from .rtn import RTNConfig


@register_scheme(quarot_2=dict(bits=2), quarot_3=dict(bits=3))
@dataclass(frozen=True, kw_only=True)
class QuaRotConfig(RTNConfig):
    """RTN's fields, and the seed of the signs."""

    name = "quarot"

    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_integers(self, seed=0)

    def _plan(self) -> LayerPlan:
        key = self.key(self.bits, per="token", rotation=self.seed)
        return LayerPlan(key, self.value(self.bits, rotation=self.seed))
