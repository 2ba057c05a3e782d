"""Options of all schemes with uniform quantization: groups, and how their scales are found."""

from dataclasses import dataclass
from typing import Any, Literal

from ..codec.quantizer import Quantizer
from ..codec.second_level import SecondLevel
from ..codec.spec import CodecSpec
from ..errors import KVPassError
from ..fields import check_integers
from .storage import StorageConfig

_Per = Literal["channel", "token"]


@dataclass(frozen=True, kw_only=True)
class UniformConfig(StorageConfig):
    """Uniform quantization with 16-bit scales and zero points: ``bits + 32 / group_size`` bits per value, plus the
    exact tokens.

    group_size: tokens that share a key scale, and channels that share a value scale. It divides the number of tokens
        that leave the window at a time (``residual``, or the page size of ``retention``).
    fit: "minmax" scales span a group; "lsq" scales and zero points minimize its squared error; "hqq" zero points
        minimize the l_p norm of its error, with p = 0.7 (HQQ).
    eta: with "minmax", the share of a group's range cut off at both ends when it is dequantized (XQuant, eq. 9).
    scale_bits: 16, or 8 to quantize scales and zero points as well (`codec.second_level`); they then take ``16 /
        group_size`` bits per value, and 64 bits per page.
    """

    group_size: int = 32
    fit: Literal["minmax", "lsq", "hqq"] = "minmax"
    eta: float = 0.0
    scale_bits: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, group_size=1)
        if self.scale_bits not in (8, 16):
            raise KVPassError(f"scale_bits={self.scale_bits} must be 8 or 16.")

    def key(
        self, bits: int, per: Literal["channel", "token"] = "channel", own_codes: float = 1.0, **fields: Any
    ) -> CodecSpec:
        """The spec of keys, quantized per channel by default. ``fields`` are other fields of the `Quantizer`."""
        retention = self.key_retention()
        if per == "channel" and (tokens := retention.page_size) % self.group_size:
            what = f"page_size={tokens} of the retention" if self._policy() else f"residual={tokens}"
            raise KVPassError(
                f"{what} must be a multiple of group_size={self.group_size}: keys are quantized in whole groups of "
                "tokens."
            )
        return CodecSpec(self._quantizer(bits, per, fields), retention, self.key_transform(), own_codes)

    def value(self, bits: int, own_codes: float = 1.0, **fields: Any) -> CodecSpec:
        """The spec of values, quantized per token."""
        return CodecSpec(self._quantizer(bits, "token", fields), self.value_retention(), own_codes=own_codes)

    def _quantizer(self, bits: int, per: _Per, fields: dict[str, Any]) -> Quantizer:
        codec = SecondLevel() if self.scale_bits == 8 else None
        if codec is not None and "codec" in fields:
            raise KVPassError(f"scale_bits=8 is a codec of its own: {fields['codec'].name!r} has 16-bit scales.")
        own = dict(group_size=self.group_size, fit=self.fit, eta=self.eta, codec=codec)
        return Quantizer(bits, per, **{**own, **fields})
