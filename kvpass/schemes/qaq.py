"""QAQ (arXiv 2403.04643): each token gets the bit width that bounds its error; outliers stay exact."""

from dataclasses import dataclass
from typing import Literal

from ..codec.quantizer import Adaptive, Quantizer
from ..codec.spec import CodecSpec
from ..errors import KVPassError
from ..fields import check_integers
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .storage import StorageConfig

_PAPER = dict(residual=1, widths=(0, 1, 2, 3, 4, 5, 6, 7, 8), every="token")


@register_scheme(qaq_demote=dict(keep_originals=False), qaq_paper=_PAPER)
@dataclass(frozen=True, kw_only=True)
class QAQConfig(StorageConfig):
    """Bit widths follow section 4.1 of the paper: those of keys depend on the energy of queries and the length, those
    of values on their attention mass. All are chosen again whenever a page is packed, or after every token.

    "qaq-paper" has the paper's regime: any width up to 8 bits, no exact tokens, a choice after every token.

    sigma_s: allowed standard deviation of attention weights due to the error of keys.
    sigma_x: allowed standard deviation of the attention output due to the error of values.
    window: number of last queries; a token's expected attention is its largest weight among them, and among all queries
        since the last choice. It may be longer than a page. If it begins inside a call of several tokens, all queries
        of that call count.
    every: "page" chooses bit widths whenever a page is packed; "token" after every token, as the paper does, which
        quantizes the whole cache again each time and is slow.
    outliers: fraction of a token's values, over all heads, that are kept exact, half of them at each end.
    widths: available bit widths; a token that needs more than the widest gets the widest. 0 stores the middle of a
        token's range.
    query_energy: squared norm of queries, scaled as in attention: one number, or one for each cache layer, as
        `kvpass.calibrate` measures them; None takes the 90 % quantile over the prompt.
    keep_originals: keep full-precision tokens in host memory, to raise a token's bit width again when needed. Without
        it, bit widths only fall.
    """

    name = "qaq"
    takes_calibration = True
    stores_layers_alone = False  # all tokens' bit planes are in one pool

    sigma_s: float = 0.001
    sigma_x: float = 0.003
    window: int = 5
    outliers: float = 0.01
    widths: tuple[int, ...] = (2, 3, 4)
    query_energy: float | tuple[float, ...] | None = None
    keep_originals: bool = True
    every: Literal["page", "token"] = "page"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, window=1)
        for energy in self.query_energy if isinstance(self.query_energy, tuple) else [self.query_energy]:
            self._plan(32, 32, energy)

    def _plan(self, head_dim: int, value_head_dim: int, energy: float | None) -> LayerPlan:
        def quantizer(role: Literal["key", "value"], head_dim: int, sigma: float) -> Quantizer:
            rows = max(self.window, 1 if self.every == "token" else self.key_retention().page_size)
            fixed = (sigma, self.outliers, rows, energy, self.keep_originals, self.every)
            adaptive = Adaptive(self.widths, role, *fixed)
            return Quantizer(max(self.widths), "token", head_dim, adaptive=adaptive)

        return LayerPlan(
            CodecSpec(quantizer("key", head_dim, self.sigma_s), self.key_retention(), self.key_transform()),
            CodecSpec(quantizer("value", value_head_dim, self.sigma_x), self.value_retention()),
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        energy = self.query_energy
        if isinstance(energy, tuple):
            if len(energy) != layer.num_layers:
                raise KVPassError(
                    f"query_energy has {len(energy)} entries, but the model has {layer.num_layers} layers."
                )
            energy = energy[layer.index]
        return self._plan(layer.head_dim, layer.value_head_dim, energy).checked(layer)
