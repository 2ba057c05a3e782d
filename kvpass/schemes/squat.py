"""SQuat (arXiv 2503.24358): KIVI whose key error is kept out of the subspace of the prompt's queries.

The queries of the prompt span, up to little, a subspace of few dimensions (their top singular vectors). Keys are
quantized a block of channels at a time; after each block the remaining channels are moved so that the error seen by
that subspace shrinks (paper eq. 6). Codes, scales and storage are KIVI's, plus one matrix per KV head and sample.
"""

from dataclasses import dataclass

from ..codec.spec import Subspace
from ..errors import KVPassError
from .base import LayerGeometry, LayerPlan, register_scheme
from .kivi import KIVIConfig


@register_scheme()
@dataclass(frozen=True)
class SQuatConfig(KIVIConfig):
    """KIVI's fields, and the subspace.

    rank: r of the paper, query directions protected.
    strength: weight of the subspace error, relative to the mean energy of the queries per channel: the paper's lambda
        times ``sum(q**2) / head_dim`` over the prompt. It depends neither on the prompt's length nor on the scale of
        the queries, where the paper's lambda multiplies squared singular values that grow with both.
    lam: the paper's lambda, instead of ``strength``. 0 gives KIVI's codes bit for bit.
    block_size: channels quantized at a time (g_d of the paper); None is head_dim / 2.
    """

    name = "squat"

    rank: int = 5
    strength: float = 1.0
    lam: float | None = None
    block_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        weight = self.strength if self.lam is None else self.lam
        if not 0 <= weight < float("inf"):
            raise KVPassError(f"The subspace weight must be finite and not negative, not {weight}.")
        if self.rank < 1:
            raise KVPassError(f"rank={self.rank} must be at least 1; for no subspace use scheme='kivi'.")

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        relative = self.lam is None
        weight = self.strength if relative else self.lam
        block_size = self.block_size or layer.head_dim // 2
        return LayerPlan(self._key(Subspace(self.rank, weight, relative, block_size)), self._value())
