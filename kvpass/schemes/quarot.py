"""QuaRot's KV cache: round to nearest, per token, after a random-sign Hadamard rotation of each head."""

from dataclasses import dataclass

from ..codec.predictor import MEAN
from ..fields import check_integers
from .base import LayerPlan, register_scheme
from .rtn import RTNConfig


@register_scheme(quarot_2=dict(bits=2), quarot_3=dict(bits=3))
@dataclass(frozen=True, kw_only=True)
class QuaRotConfig(RTNConfig):
    """RTN's fields, the seed of the signs, and ``center``: the mean of the first keys that are packed is subtracted."""

    name = "quarot"

    seed: int = 0
    center: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_integers(self, seed=0)

    def _plan(self) -> LayerPlan:
        key = self.key(self.bits, per="token", rotation=self.seed, predictor=MEAN if self.center else "")
        return LayerPlan(key, self.value(self.bits, rotation=self.seed))
