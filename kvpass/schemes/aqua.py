"""AQUA-KV (arXiv 2501.19392): predict each layer from the one below and quantize only the residual.

Keys are predicted from the dequantized keys of the layer below; values from its dequantized values and this layer's
dequantized keys (algorithm 1 of the paper). Any backbone quantizes the residual. The residual has a fraction of the
tokens' energy, so its error at the same bit width is that much smaller. Predictors come from `kvpass.calibrate`.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..codec.predictor import parse_predictor
from ..codec.spec import CodecSpec
from ..errors import KVPassError
from ..fields import check_integers, shown
from .base import LayerPlan, SchemeConfig, get, register_scheme
from .geometry import LayerGeometry
from .higgs import HIGGSConfig
from .identity import IdentityConfig
from .kivi import KIVIConfig
from .quarot import QuaRotConfig
from .rtn import RTNConfig
from .storage import StorageConfig

_BELOW = range(1, 9)


def _resolved(field: str, scheme: SchemeConfig | str | dict[str, Any]) -> SchemeConfig:
    """The config for ``scheme``. A dict of a predicted scheme contains other configs, so it is resolved by its name
    first."""
    name = scheme.get("scheme") if isinstance(scheme, dict) else None
    named = get(name if isinstance(name, str) else scheme)
    if named.needs_calibration:
        raise KVPassError(
            f"{field}={named.name!r} itself predicts from other layers: use a scheme that stores its tokens."
        )
    return get(scheme)


@register_scheme(
    aqua_paper=dict(
        residual=128,
        predictor="linear",
        backbone=HIGGSConfig(group_size=1024, across_heads=True),
        first_layer=HIGGSConfig(grid="d2n256", group_size=1024, across_heads=True),
    ),
    aqua_3=dict(backbone=HIGGSConfig(grid="d2n64")),
    aqua_4=dict(backbone=HIGGSConfig(grid="d2n256")),
    aqua_kivi=dict(backbone=KIVIConfig()),
    aqua_quarot=dict(backbone=QuaRotConfig(bits=2)),
    aqua_rtn=dict(backbone=RTNConfig(bits=2)),
)
@dataclass(frozen=True, kw_only=True)
class AquaKVConfig(StorageConfig):
    """Keys and values leave the window together, so both windows hold between 0 and ``residual - 1`` tokens. 4-bit
    weights and a short window serve short contexts best; "aqua-paper" has the paper's settings, with groups of 1,024
    channels, or all of a token if there are fewer.

    backbone: any scheme that does not share quantized values between layers; its own window and sinks are ignored, so
        HIGGS centres keys that are not predicted if this scheme has sinks.
    first_layer: the scheme of the first layer, which has none below. "auto" is HIGGS at 4 bits, centred or not, or full
        precision, whichever serves the layers above best according to the calibration.
    predictor: "linear", "low-rank" or "mlp" with 16-bit weights, "linear-4" or "low-rank-4" with 4-bit weights; "bias"
        is a mean of the model alone.
    rank: rank of "low-rank"; None is half the width of a layer's keys.
    predicted: which of keys and values are predicted; the others go to the backbone directly.
    values_from: what values are predicted from: this layer's "keys", the "values" of layers below, or "both". The
        weights of the other input are stored as zeros. "mlp" takes both.
    layers_below: which layers below are predicted from, counted from the layer down: (1,) is the one below, (1, 2) the
        two below. A layer with fewer below it takes the lowest instead. Weights of layers in between are stored as
        zeros. "mlp" takes (1,) only.
    fit_on: fit predictors to the dequantized keys and values of the layer below ("reconstructed", as in the paper), or
        to the "original" ones, which suits any backbone.
    ridge: added to the diagonal of the normal equations, relative to its mean.
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
    values_from: Literal["both", "keys", "values"] = "both"
    layers_below: tuple[int, ...] = (1,)
    fit_on: Literal["reconstructed", "original"] = "reconstructed"
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "backbone", _resolved("backbone", self.backbone))
        if self.first_layer != "auto":
            object.__setattr__(self, "first_layer", _resolved("first_layer", self.first_layer))
        if not self.layers_below or list(self.layers_below) != sorted(set(self.layers_below) & set(_BELOW)):
            raise KVPassError(
                f"layers_below={shown(self.layers_below)} must be from 1 to {_BELOW[-1]}, in ascending order."
            )
        if parse_predictor(self.predictor)[0] == "mlp" and (self.values_from, self.layers_below) != ("both", (1,)):
            raise KVPassError(
                "predictor='mlp' normalizes all of its inputs together: use values_from='both' and layers_below=(1,)."
            )
        if self.rank is not None:
            check_integers(self, rank=1)
        if self.value_page is not None:
            raise KVPassError("Values are predicted from keys, so both leave the window together: no value_page.")
        if not 0 <= self.ridge <= 1e6:
            raise KVPassError(f"ridge={self.ridge} must be from 0 to 1e6.")

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        first = layer.previous_layer is None
        scheme = self.first if first else get(self.backbone)
        if isinstance(scheme, StorageConfig) and scheme.retention is None:
            scheme = replace(scheme, sinks=self.key_retention().sinks)
        plan = scheme.plan_of(layer)
        if plan.key_source is not None or plan.value_source is not None:
            raise KVPassError(
                f"{scheme.name!r} shares quantized values between layers, which residuals of a predictor cannot: use "
                "another scheme."
            )
        keys, values = (not first and self.predicted in ("both", which) for which in ("keys", "values"))
        key = self._behind(plan.key, keys, pre_rope=self.rope == "pre")
        value = self._behind(plan.value, values, pre_rope=False)
        return LayerPlan(key, value, layers_below=max(self.layers_below)).checked(layer)

    def _behind(self, spec: CodecSpec, predicted: bool, pre_rope: bool) -> CodecSpec:
        """The backbone's ``spec`` with the window of this scheme, and with the prediction subtracted if
        ``predicted``."""
        transform = replace(spec.transform, pre_rope=pre_rope)
        if predicted:
            transform = replace(transform, center=False, predictor=self.predictor)
        return replace(spec, retention=self.key_retention(), transform=transform)

    @property
    def first(self) -> SchemeConfig:
        """The scheme of the first layer before anything is measured."""
        return self._of_four_bits(center=True) if self.first_layer == "auto" else get(self.first_layer)

    def _of_four_bits(self, center: bool) -> HIGGSConfig:
        """HIGGS at 4 bits, with the groups of the backbone if that is HIGGS."""
        backbone = get(self.backbone)
        plain = backbone if isinstance(backbone, HIGGSConfig) else HIGGSConfig()
        return HIGGSConfig(grid="d2n256", center=center, group_size=plain.group_size, across_heads=plain.across_heads)

    @property
    def first_layer_choices(self) -> list[SchemeConfig]:
        """The schemes that calibration chooses from for the first layer: cheapest first, lossless last."""
        if self.first_layer != "auto":
            return [self.first]
        return [*(self._of_four_bits(center) for center in (False, True)), IdentityConfig()]
