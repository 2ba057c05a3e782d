"""QAQ (arXiv 2403.04643): as many bits for a token as the error it causes may need, and outliers exact."""

from dataclasses import dataclass
from typing import Literal

from ..codec.quantizer import Adaptive, Quantizer
from ..codec.spec import CodecSpec
from ..errors import KVPassError
from .base import LayerGeometry, LayerPlan, register_scheme
from .storage import StorageConfig


@register_scheme(qaq_demote=dict(keep_originals=False))
@dataclass(frozen=True, kw_only=True)
class QAQConfig(StorageConfig):
    """Widths follow equations of section 4.1: keys by the energy of queries and the length, values by the attention
    they are paid. All are chosen again when a page is packed.

    sigma_s: standard deviation that attention weights may have from the error of keys.
    sigma_x: standard deviation that attention's output may have from the error of values.
    window: the last queries, whose largest attention weight is what a token is expected to be paid; it may be longer
        than a page. Of a call of several tokens in which it begins, all queries count.
    outliers: share of the values of a token, over all heads, that are kept exact, half of them at both ends.
    widths: classes of widths; a token that needs more than the widest gets the widest.
    query_energy: squared norm of queries, scaled as in attention: one number, or one for each cache layer, as
        `kvpass.calibrate` measures them; None takes the 90 % quantile of the prompt's.
    keep_originals: keep full-precision tokens in host memory, from which a token gets bits back when it needs them
        again. Without, widths only fall.
    """

    name = "qaq"
    takes_calibration = True
    stores_layers_alone = False  # planes of bits are pooled

    sigma_s: float = 0.001
    sigma_x: float = 0.003
    window: int = 5
    outliers: float = 0.01
    widths: tuple[int, ...] = (2, 3, 4)
    query_energy: float | tuple[float, ...] | None = None
    keep_originals: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for energy in self.query_energy if isinstance(self.query_energy, tuple) else [self.query_energy]:
            self._plan(32, energy)

    def _plan(self, head_dim: int, energy: float | None) -> LayerPlan:
        def quantizer(role: Literal["key", "value"], sigma: float) -> Quantizer:
            adaptive = Adaptive(self.widths, role, sigma, self.outliers, self.window, energy, self.keep_originals)
            return Quantizer(max(self.widths), "token", head_dim, adaptive=adaptive)

        return LayerPlan(
            CodecSpec(quantizer("key", self.sigma_s), self.key_retention(), self.key_transform()),
            CodecSpec(quantizer("value", self.sigma_x), self.value_retention()),
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        energy = self.query_energy
        if isinstance(energy, tuple):
            if len(energy) != layer.num_layers:
                raise KVPassError(
                    f"query_energy has {len(energy)} entries, but the model has {layer.num_layers} layers."
                )
            energy = energy[layer.index]
        return self._plan(layer.head_dim, energy).checked(layer)
