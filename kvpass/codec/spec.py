"""`CodecSpec`: says how one tensor (the keys or the values of a layer) is stored; all that an op needs to know."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, TypeVar

from ..errors import KVPassError
from ..fields import check_types, fields_alone, hash_once
from ..layout.eviction import OBSERVED
from ..layout.retention import Retention
from .bitpack import byte_rows, smallest_page
from .codec import CODECS, Codec, codec_from, described
from .quantizer import Adaptive, Quantizer, Subspace
from .transform import AS_THEY_ARE, Transform

_Part = TypeVar("_Part", "CodecSpec", Quantizer, Retention)


@dataclass(frozen=True)
class CodecSpec:
    """Storage of one logical ``[B, H_kv, S, D]`` tensor.

    quantizer: how values are quantized.
    retention: which tokens stay exact, are packed, or are evicted.
    transform: how tokens are transformed before they are quantized.
    own_codes: for layers that share codes (XQuant): the weight of this layer's codes against the codes already in the
        pool. 1 stores this layer's codes. 0 reuses the other layer's codes and stores only this layer's scale and zero
        point. Values in between average the two.
    rounding: how averaged codes become integers again.
    """

    quantizer: Quantizer
    retention: Retention
    transform: Transform = AS_THEY_ARE
    own_codes: float = 1.0
    rounding: Literal["nearest", "floor", "ceil"] = "nearest"

    def __post_init__(self) -> None:
        check_types(self)
        quantizer, page_size = self.quantizer, self.page_size
        multiple = 1 if quantizer.raw or quantizer.adaptive is not None else smallest_page(self.bits)
        if page_size % multiple:
            raise KVPassError(
                f"page_size={page_size} does not fill whole bytes at {self.bits} bits: use a multiple of {multiple}."
            )
        if quantizer.per == "channel" and page_size % quantizer.group_size:
            raise KVPassError(
                f"group_size={quantizer.group_size} does not divide page_size={page_size}: key groups run along "
                "tokens, so a page must hold whole groups. Choose a residual that is a multiple of group_size."
            )
        if quantizer.raw and (self.transform.rotation is not None or self.own_codes != 1):
            raise KVPassError(f"bits={self.bits} stores unquantized floats: there is nothing to rotate or to share.")
        self._check_sharing()
        self._check_places()
        self.codec.check(self)

    def _check_sharing(self) -> None:
        if not 0 <= self.own_codes <= 1:
            raise KVPassError(
                f"own_codes={self.own_codes} must be in [0, 1]: it is the weight of a layer's own quantized values."
            )
        if self.own_codes == 1:
            return
        if self.transform.subtracts:
            raise KVPassError("Layers cannot share the quantized residuals of a predictor.")
        if self.quantizer.grid:
            raise KVPassError("Layers cannot share the codes of a grid.")
        if self.retention.evicts:
            raise KVPassError("Layers that share codes cannot evict: both would have to keep the same tokens.")

    def _check_places(self) -> None:
        codec, adaptive, evicts = self.quantizer.codec, self.quantizer.adaptive, self.retention.evicts
        if codec is not None and (evicts or self.own_codes != 1 or adaptive is not None):
            raise KVPassError(
                f"codec={codec.name!r} supports neither eviction nor shared codes nor per-token bit widths."
            )
        if self.transform.page_rope and (evicts or self.own_codes != 1 or self.retention.keep != "recent"):
            raise KVPassError(
                "page_rope=True needs consecutive tokens in each page: none may be evicted, thinned out or shared."
            )
        if adaptive is not None and (evicts or self.retention.keep != "recent" or self.transform.keeps_tables):
            raise KVPassError(
                "Per-token bit widths do not support eviction, log-sparse windows or keys before rotary embedding: "
                "use a plain window, and rope='post'."
            )
        if evicts and not self.retention.shared and (self.transform.pre_rope or self.transform.predictor):
            what = "Keys stored before rotary embedding share one table of positions"
            what = "A layer is predicted from the same tokens of the layer below" if self.transform.predictor else what
            raise KVPassError(
                f"{what}, so all heads and layers must keep the same tokens: use HeavyHitter(..., shared=True)."
            )

    __hash__, __getstate__ = hash_once, fields_alone

    def check(self, head_dim: int) -> None:
        """Raise `KVPassError` if heads of ``head_dim`` channels cannot be stored."""
        if self.quantizer.adaptive is not None and head_dim % 8:
            raise KVPassError(f"Per-token bit widths need a head_dim that is a multiple of 8, not {head_dim}.")
        self.quantizer.check(head_dim)
        for kept in self.codec.tensors.values():
            kept.shape(self, head_dim)

    @cached_property
    def codec(self) -> Codec:
        """The codec, which defines how pages are stored."""
        return self.quantizer.codec or CODECS[""]()

    @cached_property
    def plain(self) -> "CodecSpec":
        """This spec with the default codec, which other codecs build on."""
        return replace(self, quantizer=replace(self.quantizer, codec=None))

    @cached_property
    def unbounded(self) -> "CodecSpec":
        """This spec without a sliding window, for attention that gets the window as a mask."""
        return self if self.retention.span is None else replace(self, retention=_at_defaults(self.retention, "span"))

    @property
    def calibrated(self) -> bool:
        """Whether a calibration fills any tensor of a sequence."""
        return any(kept.calibrated for kept in self.codec.sequence(self).values())

    @property
    def bits(self) -> int:
        """Bit width of a code."""
        return self.quantizer.bits

    @property
    def page_size(self) -> int:
        """Tokens per page. They leave the window together and are quantized together."""
        return self.retention.page_size

    @cached_property
    def rows(self) -> int:
        """Byte rows per page."""
        return byte_rows(self.page_size, self.bits)

    def params_shape(self, head_dim: int) -> tuple[int, int]:
        """Trailing shape of the scales of one page."""
        quantizer = self.quantizer
        if quantizer.raw:
            return 0, head_dim
        if quantizer.per == "channel":
            return self.page_size // quantizer.group_size, head_dim
        return self.page_size, head_dim // quantizer.group_size

    def zero_shape(self, head_dim: int) -> tuple[int, int]:
        """Trailing shape of the zero points of one page."""
        return (0, head_dim) if self.quantizer.grid else self.params_shape(head_dim)

    @property
    def needs_importance(self) -> bool:
        """Whether storage depends on the attention mass of tokens."""
        return self.retention.evicts or self.quantizer.adaptive is not None

    @property
    def statistic(self) -> str:
        """The attention-mass statistic that ``kvpass::attend`` must return per token; "" if storage needs none."""
        if self.quantizer.adaptive is not None:
            return f"max-{self.quantizer.adaptive.rows}"
        if not self.retention.evicts:
            return ""
        return {"attention": "sum", "observed": f"sum-{OBSERVED}"}.get(self.retention.evict, "")

    @cached_property
    def features(self) -> frozenset[str]:
        """Features that an implementation must support to serve this spec, such as "bits=2" and "rotation".

        Every field that differs from its default is a feature, except sizes. So an implementation that does not list a
        newly added field does not serve it.
        """
        return frozenset(_features(self))

    @cached_property
    def stored_as(self) -> "CodecSpec":
        """The parts of the spec that reading depends on. Fields that only affect quantization are reset to defaults."""
        return replace(
            _at_defaults(self, "own_codes", "rounding"),
            quantizer=_at_defaults(self.quantizer, "fit", "eta", "subspace"),
            retention=_at_defaults(self.retention, "budget", "evict", "shared", "span"),
        )

    def __str__(self) -> str:
        """The canonical text, which is an argument of ops and part of compile-cache keys. `parse` inverts it."""
        text = asdict(self)
        text["quantizer"]["codec"] = described(self.quantizer.codec)
        return json.dumps(text, separators=(",", ":"))


def _at_defaults(part: _Part, *names: str) -> _Part:
    defaults: dict[str, Any] = {field.name: field.default for field in fields(part) if field.name in names}
    return replace(part, **defaults)


_PARTS = Quantizer, Retention, Transform
_SIZES = "group_size", "window", "page_size", "sinks", "rollback", "span"
_CHOICES = "bits", "per", "fit", "codec", "keep", "evict", "predictor"  # every value is a feature


def _features(part: Any) -> Iterator[str]:
    for field in fields(part):
        name, value = field.name, getattr(part, field.name)
        if isinstance(value, _PARTS):
            yield from _features(value)
            continue
        if name in _SIZES or value == field.default:
            continue
        shown = value.name if isinstance(value, Codec) else value
        yield f"{name}={shown}" if name in _CHOICES else name
        if is_dataclass(value):  # its fields with defaults are features of their own
            optional = (inner for inner in fields(value) if inner.default is not MISSING)
            yield from (f"{name}.{inner.name}" for inner in optional if getattr(value, inner.name) != inner.default)


@cache
def parse(text: str) -> CodecSpec:
    """The `CodecSpec` that ``str(spec)`` wrote."""
    spec = json.loads(text)
    quantizer = spec["quantizer"]
    quantizer["codec"] = codec_from(quantizer["codec"])
    for name, cls in (("subspace", Subspace), ("adaptive", Adaptive)):
        quantizer[name] = cls(**quantizer[name]) if quantizer[name] else None
    parts = Quantizer(**quantizer), Retention(**spec["retention"]), Transform(**spec["transform"])
    return CodecSpec(*parts, own_codes=spec["own_codes"], rounding=spec["rounding"])
