"""SQuat (arXiv 2503.24358): KIVI with the key error kept out of the subspace of the prompt's queries.

The queries of the prompt lie almost entirely in a subspace of few dimensions, spanned by their top singular vectors.
Keys are quantized a block of channels at a time. After each block, the remaining channels are adjusted so that the
error in that subspace shrinks (paper eq. 6). Quantized values, scales and storage are KIVI's, plus one matrix per KV
head and sample.
"""

from dataclasses import dataclass

from ..codec.quantizer import Subspace
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .kivi import KIVIConfig


@register_scheme(squat_pre=dict(rope="pre"), squat_paper=dict(lam=1e-3))
@dataclass(frozen=True, kw_only=True)
class SQuatConfig(KIVIConfig):
    """KIVI's fields, and the subspace.

    rank: r of the paper, query directions protected.
    strength: weight of the subspace error, relative to the mean energy of the queries per channel: the paper's lambda
        times ``sum(q**2) / head_dim`` over the prompt. It depends neither on the prompt's length nor on the scale of
        the queries. The paper's lambda multiplies squared singular values, which grow with both.
    lam: the paper's lambda, instead of ``strength``. 0 gives KIVI's quantized values bit for bit.
    block_size: channels quantized at a time (g_d of the paper); None is head_dim / 2.

    The default is another parametrisation than the paper's; "squat-paper" has its lambda of 0.001, rank 5 and blocks of
    half a head (64 of 128 channels).

    With ``rope="pre"`` the subspace is that of the queries before rotary embedding.
    """

    name = "squat"

    rank: int = 5
    strength: float = 0.5
    lam: float | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._subspace(head_dim=2)

    def _subspace(self, head_dim: int) -> Subspace:
        block_size = head_dim // 2 if self.block_size is None else self.block_size
        weight = self.strength if self.lam is None else self.lam
        return Subspace(self.rank, weight, self.lam is None, block_size)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan(self._subspace(layer.head_dim), layer.value_head_dim).checked(layer)
