"""KIVI (arXiv 2402.02750): keys per channel, values per token, recent tokens exact."""

from dataclasses import dataclass

from ..codec.spec import CodecSpec, Subspace, check_integers
from ..errors import KVPassError
from .base import LayerGeometry, LayerPlan, SchemeConfig, register_scheme


@register_scheme(kivi_4=dict(bits=4))
@dataclass(frozen=True)
class KIVIConfig(SchemeConfig):
    """Uniform codes with 16-bit scales: ``bits + 32 / group_size`` bits a value, plus the window.

    bits: code width, one of 1, 2, 3, 4, 8.
    group_size: tokens that share a key scale, and channels that share a value scale.
    residual: R of the paper, a multiple of ``group_size``. The key window swings between 0 and R - 1 tokens, as in the
        paper. Values leave theirs R at a time too, so it holds R to 2R - 1 tokens where the paper holds R.
    sinks: first tokens kept in full precision (0 in the paper).
    """

    name = "kivi"

    bits: int = 2
    group_size: int = 32
    residual: int = 32
    sinks: int = 0

    def __post_init__(self):
        check_integers(self, bits=1, group_size=1, residual=1, sinks=0)
        if self.residual % self.group_size:
            raise KVPassError(
                f"residual={self.residual} must be a multiple of group_size={self.group_size}: keys are "
                "packed in whole groups of tokens."
            )
        self._key(None), self._value()  # an impossible config fails here, not at the first token

    def _key(self, subspace: Subspace | None) -> CodecSpec:
        return CodecSpec(self.bits, "channel", self.group_size, self.residual, sinks=self.sinks, subspace=subspace)

    def _value(self) -> CodecSpec:
        return CodecSpec(self.bits, "token", self.group_size, self.residual, residual=self.residual, sinks=self.sinks)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return LayerPlan(self._key(None), self._value()).checked(layer)
