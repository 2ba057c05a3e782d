"""HIGGS: rotate heads until they are nearly normal, and quantize them to grids that are optimal for normal vectors."""

from dataclasses import dataclass
from typing import Literal

from ..codec.across_heads import across_heads
from ..codec.codebook import grid_shape
from ..codec.quantizer import Quantizer
from ..codec.spec import CodecSpec
from ..codec.transform import Transform
from ..fields import check_integers
from ..layout.retention import Retention
from .base import LayerPlan, register_scheme
from .geometry import Heads, LayerGeometry
from .storage import StorageConfig


@register_scheme(
    higgs_3=dict(grid="d2n64"),
    higgs_4=dict(grid="d2n256"),
    higgs_sinks=dict(sinks=4),
    **{"higgs-1.5": dict(grid="d4n64")},
)
@dataclass(frozen=True, kw_only=True)
class HIGGSConfig(StorageConfig):
    """``log2(n) / d + 16 / group_size`` bits per value, plus the exact tokens of `StorageConfig`.

    grid: "d2n16" has 16 points for 2 values, 2 bits per value; "d2n64" 3 bits, "d2n256" 4 bits, "d4n64" 1.5 bits.
    group_size: channels that share a scale; None is the head, which keeps heads independent (1,024 in the paper).
    across_heads: rotation and groups cross the heads of a token; a group has ``group_size`` of its channels, or all if
        there are fewer. Pages are then dequantized before attention, and such a cache cannot evict tokens.
    center: subtract the mean of the first packed keys from all keys, in channels where the mean is significant. Keys of
        models with a bias have such a mean, which would waste precision. None does so if there are sinks: the first
        token's key differs from the others and gets much attention, so centering would hurt it.
    fit: scales are the "rms" of a group, or minimize the squared error for the given codes ("lsq").
    seed: seed of the signs of the rotation.
    """

    name = "higgs"

    grid: str = "d2n16"
    group_size: int | None = None
    across_heads: bool = False
    center: bool | None = None
    fit: Literal["rms", "lsq"] = "rms"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, seed=0)
        if self.group_size is not None:
            check_integers(self, group_size=1)
        self._plan(Heads(1, 64), Heads(1, 64))

    def _plan(self, of_keys: Heads, of_values: Heads) -> LayerPlan:
        keys = self.key_retention()
        center = keys.sinks > 0 if self.center is None else self.center
        transform = self.key_transform(center=center, rotation=self.seed)
        return LayerPlan(
            self._spec(of_keys, keys, transform),
            self._spec(of_values, self.value_retention(), Transform(rotation=self.seed)),
        )

    def _spec(self, heads: Heads, retention: Retention, transform: Transform) -> CodecSpec:
        fit: Literal["minmax", "lsq"] = "lsq" if self.fit == "lsq" else "minmax"
        group = self.group_size or (heads.number * heads.dim if self.across_heads else heads.dim)
        quantizer = Quantizer(grid_shape(self.grid)[1], "token", group, fit, grid=self.grid)
        spec = CodecSpec(quantizer, retention, transform)
        return across_heads(spec, *heads) if self.across_heads else spec

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan(*layer.heads).checked(layer)
