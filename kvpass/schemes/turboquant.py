"""TurboQuant (arXiv 2504.19874): randomly rotated tokens, one norm per token, and one optimal codebook for all."""

from dataclasses import dataclass
from typing import Literal

from ..codec.codec import Codec
from ..codec.mixed import Mixed
from ..codec.quantizer import Quantizer
from ..codec.sketch import Sketched
from ..codec.spec import CodecSpec
from ..codec.transform import Transform
from ..errors import KVPassError
from ..fields import check_integers
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .storage import StorageConfig


@register_scheme(
    turboquant_3=dict(key_bits=3, value_bits=3),
    turboquant_4=dict(key_bits=4, value_bits=4),
    turboquant_prod=dict(key_bits=3, keys="prod"),
    turboquant_prod_4=dict(key_bits=4, value_bits=4, keys="prod"),
    **{"turboquant-2.5": dict(share=0.25), "turboquant-3.5": dict(key_bits=3, value_bits=3, share=0.25)},
)
@dataclass(frozen=True, kw_only=True)
class TurboQuantConfig(StorageConfig):
    """``bits + 16 / head_dim`` bits per value; a sketch needs a second norm, another ``16 / head_dim``. With two bit
    widths, ``bits + share + 32 / head_dim + 16 * share / residual``.

    key_bits, value_bits: 1 to 4 bits for every coordinate, quantized with a Lloyd-Max codebook (section 3.1); 2 to 5
        with a sketch.
    keys: "mse" minimizes the squared error (algorithm 1). "prod" uses one bit less for that, and one bit for a sketch
        of the remaining error, which makes scores unbiased (algorithm 2).
    share: fraction of a page's channels, the largest ones, that get one more bit and a rotation and norm of their own.
        The paper's 2.5 bits are 32 of 128 channels at 3 bits and the others at 2, with both norms.
    seed: seed of the signs of the rotation.

    The paper rotates by a dense random matrix, and uses the codebook for a coordinate on the sphere. Here the rotation
    is a random-sign Hadamard matrix, as in vLLM, and the codebook is the normal limit of the paper's. A token with most
    of its energy in one channel stays far from normal under that matrix, unlike under a dense one. Which channels get
    more bits is chosen for each page.
    """

    name = "turboquant"

    key_bits: int = 2
    value_bits: int = 2
    keys: Literal["mse", "prod"] = "mse"
    share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, key_bits=1, value_bits=1, seed=0)
        for name, bits, sketch in (
            ("key_bits", self.key_bits, self.keys == "prod"),
            ("value_bits", self.value_bits, 0),
        ):
            if not 1 <= bits - sketch <= 4:
                raise KVPassError(
                    f"{name}={bits}: codebooks take 1 to 4 bits, plus one bit with a sketch (keys='prod')."
                )
        if self.share and (self.keys == "prod" or not 0 < self.share < 1):
            raise KVPassError(
                f"share={self.share} must be between 0 and 1, and needs keys='mse': it is the fraction of channels "
                "with one more bit."
            )
        self._plan(64, 64)

    def _plan(self, head_dim: int, value_head_dim: int) -> LayerPlan:
        mixed = Mixed(self.share) if self.share else None

        def quantizer(bits: int, head_dim: int, codec: Codec | None = mixed) -> Quantizer:
            return Quantizer(bits, "token", head_dim, grid=f"d1n{2**bits}", codec=codec)

        sketched = self.keys == "prod"
        key = quantizer(self.key_bits - 1, head_dim, Sketched()) if sketched else quantizer(self.key_bits, head_dim)
        return LayerPlan(
            CodecSpec(key, self.key_retention(), self.key_transform(rotation=self.seed)),
            CodecSpec(
                quantizer(self.value_bits, value_head_dim), self.value_retention(), Transform(rotation=self.seed)
            ),
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan(layer.head_dim, layer.value_head_dim).checked(layer)
