"""`Transform`: says how tokens are transformed before quantization. Reading undoes it."""

from dataclasses import dataclass

from ..errors import KVPassError
from ..fields import check_types, fields_alone, hash_once
from .predictor import parse_predictor


@dataclass(frozen=True)
class Transform:
    """The transforms that are applied to tokens before quantization.

    pre_rope: store keys before rotary embedding.
    center: subtract the mean of the first packed tokens (`codec.center`).
    page_rope: rotate keys relative to the middle token of their page (`codec.page_rope`). Queries are rotated back once
        per page. With ``center``, the mean is that of the keys before rotary embedding.
    numbered: text of the rotation (`codec.rope`) if page-relative RoPE is computed from the number of the middle token
        and calibrated angles. "" if it uses the model's own rotary tables, which have to be captured.
    predictor: subtract a prediction from the dequantized tokens of layers below (`codec.predictor`): "bias", "linear",
        "low-rank", "mlp", "linear-4" or "low-rank-4" ("-4": 4-bit weights). "" means none.
    rotation: seed of a random-sign Hadamard rotation of the channels (`codec.hadamard`), applied last. None means none.
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
        """Describe in words what is quantized, for tokens called ``name``."""
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
        """Whether the cache keeps rotary tables: keys are not stored as they are after rotary embedding."""
        return self.pre_rope or self.page_rope

    @property
    def turns(self) -> bool:
        """Whether keys are rotated by the model's rotary tables, which are found in its graph."""
        return self.keeps_tables and not self.numbered

    @property
    def subtracts(self) -> bool:
        """Whether a mean or a prediction is subtracted from tokens."""
        return self.center or bool(self.predictor)


AS_THEY_ARE = Transform()
