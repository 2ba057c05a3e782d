"""`Transform`: what is done to tokens before they are quantized, and undone when they are read."""

from dataclasses import dataclass

from ..errors import KVPassError
from ..fields import check_types, fields_alone, hash_once
from .predictor import parse_predictor


@dataclass(frozen=True)
class Transform:
    """What is coded instead of a token.

    pre_rope: the tokens are keys as they were before the rotary embedding.
    center: less the mean of the tokens packed first (`codec.center`).
    predictor: less a function of what the same tokens decode to in the layer below (`codec.predictor`): "linear",
        "low-rank", "mlp", and the first two with "-4" behind them for weights of 4 bits; "" for none.
    rotation: behind that, a random-sign Hadamard rotation of the channels with this seed (`codec.hadamard`); None for
        none.
    """

    pre_rope: bool = False
    center: bool = False
    predictor: str = ""
    rotation: int | None = None

    def __post_init__(self):
        check_types(self)
        if self.predictor:
            parse_predictor(self.predictor)
        if self.predictor and self.center:
            raise KVPassError(
                f"What a {self.predictor} predictor leaves over has next to no mean: use center=False with it."
            )

    __hash__, __getstate__ = hash_once, fields_alone

    def __str__(self) -> str:
        less = " less its mean" if self.center else f" less {self.predictor} prediction"
        before, rotated = " before RoPE" if self.pre_rope else "", "" if self.rotation is None else " rotated"
        return f"{before}{less if self.subtracts else ''}{rotated}"

    @property
    def subtracts(self) -> bool:
        """Whether something is subtracted from tokens."""
        return self.center or bool(self.predictor)


AS_THEY_ARE = Transform()
