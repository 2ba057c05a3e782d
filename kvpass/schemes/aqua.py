"""AQUA-KV (arXiv 2501.19392): each layer is predicted from the one below, and only the residual is quantized.

Keys are predicted from the reconstructed keys of the layer below, values from its reconstructed values and this layer's
reconstructed keys (algorithm 1 of the paper). The residual goes to any backbone; since its energy is a fraction of the
tokens', so is its error at the same width. Predictors come from `kvpass.calibrate`.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..codec.predictor import parse_predictor
from ..codec.spec import CodecSpec
from ..errors import KVPassError
from ..fields import check_integers
from .base import LayerGeometry, LayerPlan, SchemeConfig, get, register_scheme
from .higgs import HIGGSConfig
from .identity import IdentityConfig
from .kivi import KIVIConfig
from .quarot import QuaRotConfig
from .rtn import RTNConfig
from .storage import StorageConfig


def _resolved(field: str, scheme: SchemeConfig | str | dict[str, Any]) -> SchemeConfig:
    """What `get` makes of ``scheme``, by its name alone at first: a dict of one that is predicted holds others."""
    name = scheme.get("scheme") if isinstance(scheme, dict) else None
    named = get(name if isinstance(name, str) else scheme)
    if named.needs_calibration:
        raise KVPassError(
            f"{field}={named.name!r} itself predicts from other layers: use a scheme that stores its tokens."
        )
    return get(scheme)


@register_scheme(
    aqua_paper=dict(residual=128, predictor="linear"),
    aqua_3=dict(backbone=HIGGSConfig(grid="d2n64")),
    aqua_4=dict(backbone=HIGGSConfig(grid="d2n256")),
    aqua_kivi=dict(backbone=KIVIConfig()),
    aqua_quarot=dict(backbone=QuaRotConfig(bits=2)),
    aqua_rtn=dict(backbone=RTNConfig(bits=2)),
)
@dataclass(frozen=True, kw_only=True)
class AquaKVConfig(StorageConfig):
    """Keys and values leave the window together: it swings between 0 and ``residual - 1`` tokens for both. Weights of 4
    bits and a short window serve short contexts best; "aqua-paper" has the paper's.

    backbone: any scheme that does not share codes between layers; its own window and sinks do not matter here.
    first_layer: the scheme of the first layer, which has none below; "auto" is HIGGS at 4 bits, centred or not, or full
        precision, whichever calibration finds to serve the layers above.
    predictor: "linear", "low-rank" or "mlp" with 16-bit weights, "linear-4" or "low-rank-4" with 4-bit ones.
    rank: of "low-rank"; None is half the width of a layer's keys.
    predicted: which of keys and values are predicted; the others go to the backbone directly.
    fit_on: predictors are fitted to the dequantized keys and values of the layer below ("reconstructed", as in the
        paper), or to the "original" ones, which serves any backbone.
    ridge: added to the diagonal of the normal equations, in units of its mean.
    """

    name = "aqua"
    needs_calibration = takes_calibration = True
    stores_layers_alone = False

    sinks: int = 4
    rope: Literal["post", "pre"] = "pre"
    backbone: SchemeConfig | str | dict[str, Any] = field(default_factory=HIGGSConfig)
    first_layer: SchemeConfig | str | dict[str, Any] = "auto"
    predictor: str = "linear-4"
    rank: int | None = None
    predicted: Literal["both", "keys", "values"] = "both"
    fit_on: Literal["reconstructed", "original"] = "reconstructed"
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "backbone", _resolved("backbone", self.backbone))
        if self.first_layer != "auto":
            object.__setattr__(self, "first_layer", _resolved("first_layer", self.first_layer))
        parse_predictor(self.predictor)
        if self.rank is not None:
            check_integers(self, rank=1)
        if not 0 <= self.ridge <= 1e6:
            raise KVPassError(f"ridge={self.ridge} must be from 0 to 1e6.")

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        first = layer.previous_layer is None
        scheme = self.first if first else get(self.backbone)
        plan = scheme.plan_of(layer)
        if plan.key_source is not None or plan.value_source is not None:
            raise KVPassError(
                f"{scheme.name!r} shares quantized values between layers, which residuals of a predictor cannot: use "
                "another scheme."
            )
        keys, values = (not first and self.predicted in ("both", which) for which in ("keys", "values"))
        key = self._behind(plan.key, keys, pre_rope=self.rope == "pre")
        return LayerPlan(key, self._behind(plan.value, values, pre_rope=False)).checked(layer)

    def _behind(self, spec: CodecSpec, predicted: bool, pre_rope: bool) -> CodecSpec:
        """``spec`` of the backbone with the window of this scheme, and with the prediction subtracted if there is."""
        transform = replace(spec.transform, pre_rope=pre_rope)
        if predicted:
            transform = replace(transform, center=False, predictor=self.predictor)
        return replace(spec, retention=self.key_retention(), transform=transform)

    @property
    def first(self) -> SchemeConfig:
        """The scheme of the first layer, as long as nothing was measured."""
        return HIGGSConfig(grid="d2n256", center=True) if self.first_layer == "auto" else get(self.first_layer)

    @property
    def first_layer_choices(self) -> list[SchemeConfig]:
        """What calibration chooses the first layer's scheme from, the cheapest first and the lossless one last."""
        if self.first_layer != "auto":
            return [self.first]
        return [*(HIGGSConfig(grid="d2n256", center=center) for center in (False, True)), IdentityConfig()]
