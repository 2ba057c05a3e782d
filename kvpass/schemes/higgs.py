"""HIGGS: rotate heads until they are nearly normal, and quantize them to grids that are optimal for normal vectors."""

from dataclasses import dataclass
from typing import Literal

from ..codec.codebook import grid_shape
from ..codec.quantizer import Quantizer
from ..codec.spec import CodecSpec
from ..codec.transform import Transform
from ..fields import check_integers
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
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
    center: subtract the mean of the first packed keys from all keys, in channels where the mean is significant. Keys of
        models with a bias have such a mean, which would waste precision. None does so if there are sinks: the first
        token's key differs from the others and gets much attention, so centering would hurt it.
    fit: scales are the "rms" of a group, or minimize the squared error for the given codes ("lsq").
    seed: seed of the signs of the rotation.
    """

    name = "higgs"

    grid: str = "d2n16"
    group_size: int | None = None
    center: bool | None = None
    fit: Literal["rms", "lsq"] = "rms"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, seed=0)
        if self.group_size is not None:
            check_integers(self, group_size=1)
        self._plan(64, 64)

    def _plan(self, head_dim: int, value_head_dim: int) -> LayerPlan:
        fit: Literal["minmax", "lsq"] = "lsq" if self.fit == "lsq" else "minmax"

        def quantizer(head_dim: int) -> Quantizer:
            return Quantizer(grid_shape(self.grid)[1], "token", self.group_size or head_dim, fit, grid=self.grid)

        keys = self.key_retention()
        center = keys.sinks > 0 if self.center is None else self.center
        return LayerPlan(
            CodecSpec(quantizer(head_dim), keys, self.key_transform(center=center, rotation=self.seed)),
            CodecSpec(quantizer(value_head_dim), self.value_retention(), Transform(rotation=self.seed)),
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan(layer.head_dim, layer.value_head_dim).checked(layer)
