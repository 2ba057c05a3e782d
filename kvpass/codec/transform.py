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
    page_rope: keys are turned back by the rotary embedding of the middle token of their page (`codec.page_rope`), which
        a query is, too, once for a page. A mean is that of the keys before rotary embedding.
    numbered: how frames are turned (`codec.rope`) where that goes by the number of the middle token, with angles that a
        calibration found; "" where it goes by the model's own tables, which have to be captured.
    predictor: less a function of what the same tokens dequantize to in the layer below (`codec.predictor`): "linear",
        "low-rank", "mlp", and the first two with "-4" behind them for weights of 4 bits; "" for none.
    rotation: behind that, a random-sign Hadamard rotation of the channels with this seed (`codec.hadamard`); None for
        none.
    """

    pre_rope: bool = False
    center: bool = False
    predictor: str = ""
    rotation: int | None = None
    page_rope: bool = False
    numbered: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        if self.numbered and not self.page_rope:
            raise KVPassError("numbered describes page-relative RoPE: set page_rope=True.")
        if self.page_rope and (self.pre_rope or self.predictor or self.rotation is not None):
            raise KVPassError(
                "page_rope=True is for keys after rotary embedding that are neither predicted nor rotated."
            )
        if self.predictor:
            parse_predictor(self.predictor)
        if self.predictor and self.center:
            raise KVPassError(
                f"The residual of a {self.predictor} predictor has almost no mean: use center=False with it."
            )

    __hash__, __getstate__ = hash_once, fields_alone

    def of(self, name: str) -> str:
        """What is coded of tokens called ``name``, in words."""
        done = {
            "before RoPE": self.pre_rope,
            "less its mean": self.center,
            "with page-relative RoPE": self.page_rope,
            f"less {self.predictor} prediction": self.predictor,
            "rotated": self.rotation is not None,
        }
        return " ".join([name, *(words for words, there in done.items() if there)])

    @property
    def keeps_tables(self) -> bool:
        """Whether keys are not coded as rotary embedding leaves them."""
        return self.pre_rope or self.page_rope

    @property
    def turns(self) -> bool:
        """Whether they are turned by tables of the model, which are found in its graph."""
        return self.keeps_tables and not self.numbered

    @property
    def subtracts(self) -> bool:
        """Whether something is subtracted from tokens."""
        return self.center or bool(self.predictor)


AS_THEY_ARE = Transform()
