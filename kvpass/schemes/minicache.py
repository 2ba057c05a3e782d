"""MiniCache (arXiv 2405.14366): in the upper half of a model, pairs of neighbouring layers share the directions of
tokens."""

from dataclasses import dataclass

from ..codec.spec import CodecSpec
from ..errors import KVPassError
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .uniform import UniformConfig


@register_scheme(minicache_2=dict(bits=2))
@dataclass(frozen=True, kw_only=True)
class MiniCacheConfig(UniformConfig):
    """``bits + 32 / group_size`` bits per value, and only ``32 / group_size`` in the second layer of each merged pair.

    The paper interpolates unit vectors of the two layers and gives each layer its own norms back (eq. 2 and 3): ``e =
    sin((1 - t) W) / sin W * x_below / |x_below| + sin(t W) / sin W * x / |x|``. Here quantized values are interpolated,
    ``(1 - t) * codes_below + t * codes``, and rounded; each layer keeps its own scales and zero points. So directions
    are those of a group minus its minimum, and interpolation follows the chord instead of the arc. All tokens but those
    of the window and the sinks are merged. The paper leaves the 5 % that differ most unmerged, for which a layer that
    shares quantized values has no room.

    start: fraction of the layers, from the first on, that are not merged; the others are paired.
    t: weight of the upper layer of a pair.
    """

    name = "minicache"
    stores_layers_alone = False

    bits: int = 4
    sinks: int = 4
    start: float = 0.5
    t: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, share in (("start", self.start), ("t", self.t)):
            if not 0 <= share <= 1:
                raise KVPassError(f"{name}={share} must be a fraction in [0, 1].")
        if self.fit == "lsq":
            raise KVPassError(
                "fit='lsq' fits scales to finished codes, and merged layers have none yet: use fit='minmax'."
            )
        self._of(own_codes=1.0)

    def _of(self, own_codes: float) -> tuple[CodecSpec, CodecSpec]:
        return self.key(self.bits, "token", own_codes), self.value(self.bits, own_codes)

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        behind = layer.index - int(self.start * layer.num_layers)
        below = layer.index - 1 if behind > 0 and behind % 2 and layer.previous_layer == layer.index - 1 else None
        return LayerPlan(*self._of(1.0 if below is None else self.t), below, below).checked(layer)
