"""`Codec`: the base class of all ways to store pages. Each subclass is one codec; its fields are its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..errors import KVPassError
from ..fields import check_types, shown
from ..layout.pool import whole
from .bitpack import byte_rows

if TYPE_CHECKING:
    from .spec import CodecSpec
    from .tensors import Pack


class Kept(NamedTuple):
    """Declares one tensor that a codec keeps.

    shape: function of the spec and head_dim. Returns the shape for one page of one head, or, for the tensors of a
        sequence, for one head. Raises `KVPassError` if the spec does not fit head_dim.
    dtype: None means the 16-bit dtype of scales (`affine.params_dtype`).
    calibrated: for the tensors of a sequence: True if a calibration fills the tensor and prompts do not change it.
    """

    shape: Callable[[CodecSpec, int], tuple[int, ...]]
    dtype: torch.dtype | None = None
    calibrated: bool = False


NO_KEYS = "Values follow the bit widths of their layer's keys, and those keys were not passed."

CODECS: dict[str, type[Codec]] = {}
"""All registered codecs by name. "" is `pages.Affine`, the codec of a `Quantizer` with ``codec=None``."""


@dataclass(frozen=True)
class Codec:
    """Defines how the pages of a tensor are stored, and which tensors a cache keeps for that.

    Subclasses are frozen dataclasses. Their fields are the codec's parameters, which are part of the spec and of its
    text. `CodecSpec.codec` returns the codec of a spec. A subclass registers itself under its ``name``:
    ``class Boosted(Codec, name="boosted")``.

    tensors: the tensors kept for each page, in order, each ``[B, H_kv, pages, *shape]``.
    quantizes_with, dequantizes_with: names of the sequence and model tensors that `quantize` and `dequantize` take, in
        order. A tensor that the spec does not have is left out.
    whole_layer: whether one page holds all heads of a layer, ``[B, 1, pages, 1, bytes]``. `page_bytes` gives its size.
    dequantizes_any_bytes: whether `dequantize`, and every kernel that reads these pages, accepts arbitrary bytes in its
        page, sequence and model tensors: no exception and no out-of-bounds access, though the values are meaningless.
        Servers that read memory before anything is stored in it need this (`kvpass.vllm`). Codecs that store indices
        cannot offer it.
    """

    name: ClassVar[str]
    tensors: ClassVar[Mapping[str, Kept]]
    quantizes_with: ClassVar[tuple[str, ...]] = ()
    dequantizes_with: ClassVar[tuple[str, ...]] = ()
    whole_layer: ClassVar[bool] = False
    dequantizes_any_bytes: ClassVar[bool] = False

    def __init_subclass__(cls, name: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if name is None:
            return
        there = CODECS.get(name)
        if there is not None and (there.__module__, there.__qualname__) != (cls.__module__, cls.__qualname__):
            raise KVPassError(
                f"The codec name {name!r} belongs to {there.__module__}.{there.__qualname__}: use another."
            )
        cls.name = name
        CODECS[name] = cls

    def __post_init__(self) -> None:
        check_types(self)

    @classmethod
    def of(cls, spec: CodecSpec) -> Self:
        """The codec of ``spec``. Raises `KVPassError` if it is not an instance of this class."""
        if not isinstance(spec.codec, cls):
            raise KVPassError(f"This needs Quantizer(..., codec={cls.__name__}(...)), not {shown(spec.codec)}.")
        return spec.codec

    # ------------------------------------------------------------ tensors

    def sequence(self, spec: CodecSpec) -> Mapping[str, Kept]:
        """Tensors fitted to each sequence and kept beside its pages, each ``[B, H_kv, *shape]``."""
        return {}

    def model(self, spec: CodecSpec) -> tuple[str, ...]:
        """Names of the model's calibrated tensors, each ``[1, H_kv, ...]``. All caches of the model share them."""
        return ()

    def page_bytes(self, kept: Mapping[str, Tensor], heads: int, head_dim: int, spec: CodecSpec) -> int:
        """Bytes per page of a layer with ``heads`` KV heads, for codecs with `whole_layer`.

        kept: the tensors of the model, by name.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ requirements

    @property
    def needs_queries(self) -> bool:
        """Whether the codec is fitted to the prompt's queries."""
        return False

    @property
    def takes_queries(self) -> bool:
        """Whether the codec is fitted to the prompt's queries if the call has them."""
        return self.needs_queries

    @property
    def from_keys(self) -> tuple[str, ...]:
        """For values: names of the sequence tensors of the layer's keys that `fit_tokens` takes, too."""
        return ()

    @property
    def needs_concentration(self) -> bool:
        """Whether the codec is fitted to how concentrated the prompt's attention is, in a sequence tensor called
        ``concentration``."""
        return False

    @property
    def chooses(self) -> bool:
        """Whether queries, from the prompt or from a calibration, select which tokens of a page get more bits."""
        return False

    @property
    def follows_keys(self) -> bool:
        """Whether the codec reuses the token selection of the layer's keys. `quantize` then takes `marks` last."""
        return False

    def check(self, spec: CodecSpec) -> None:
        """Raise `KVPassError` if the codec cannot store ``spec``. Called when the spec is created."""

    def channels(self, head_dim: int) -> int:
        """Number of channels of a token that are divided into groups: those of a head, or of all heads together."""
        return head_dim

    def check_head(self, head_dim: int) -> None:
        """Raise `KVPassError` if the codec cannot store heads of this ``head_dim``."""

    # ------------------------------------------------------------ fit, quantize, dequantize

    def fit_queries(self, kept: Mapping[str, Tensor], q: Tensor | None, valid: Tensor | None, spec: CodecSpec) -> None:
        """Fit the codec to the prompt's queries, before the first token is stored.

        kept: the tensors of the sequence, which are written in place.
        q: ``[B, H_kv, N, D]``, the query heads of each KV head concatenated along N. None if there are no queries:
            after `crop` has removed all pages, or if the codec needs none.
        valid: ``[B, N]`` bool, False for padding. None means no padding.
        """

    def fit_tokens(self, kept: Mapping[str, Tensor], x: Tensor, valid: Tensor | None, spec: CodecSpec) -> None:
        """Fit the codec to the first tokens that are packed.

        kept: the tensors of the sequence, which are written in place, and those named in `from_keys`.
        x: ``[B, H_kv, T, D]``, the tokens, transformed as for `quantize`.
        valid: ``[B, T]`` bool, as in `fit_queries`.
        """

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Quantize whole pages ``[B, H, N * P, D]`` to the tensors named in `tensors`; see `pages.quantize_pages`."""
        raise NotImplementedError

    def dequantize(self, *tensors_and_spec: Any) -> Tensor:
        """Dequantize pages to tokens ``[B, H, N * P, D]`` float32.

        Takes the tensors that `quantize` returned, then the tensors named in `dequantizes_with`, then the spec.
        """
        raise NotImplementedError

    def marks(self, pack: Pack, first: int, count: int, spec: CodecSpec) -> Tensor:
        """Bit mask of the tokens whose keys got more bits, in ``count`` pages from ``first`` on.

        ``[B, H, count, P / 8, 1]`` uint8. It is read from the first bytes of the first tensor of the key pages,
        ``pack.key_pages``. Raises `KVPassError` if ``pack`` has none.
        """
        if pack.key_pages is None:
            raise KVPassError(NO_KEYS)
        pages = whole(pack.key_pages, first + count)[:, :, first : first + count]
        return self.marks_in(pages, pages.shape[1], spec)

    def marks_in(self, key_pages: Tensor, heads: int, spec: CodecSpec) -> Tensor:
        """`marks`, from key pages ``[B, H or 1, N, 1, bytes]`` of ``heads`` heads."""
        return marks_of(key_pages, spec.page_size)

    def describe(self, quantizer: str) -> str:
        """Describe in words how values are quantized. ``quantizer`` is the description of the quantizer alone."""
        return f"{quantizer} by {self.name}"


def marks_of(pages: Tensor, page_size: int) -> Tensor:
    """Bit mask of the tokens that have more bits, of pages ``[..., N, 1, bytes]``: ``[..., N, P / 8, 1]`` uint8."""
    return pages.squeeze(-2)[..., : byte_rows(page_size, 1)].unsqueeze(-1)


def described(codec: Codec | None) -> dict[str, Any] | None:
    """``codec`` as a JSON-serializable dict of its name and fields; None for None."""
    return None if codec is None else {"name": codec.name, **asdict(codec)}


def codec_from(fields: dict[str, Any] | None) -> Codec | None:
    """Inverse of `described`. Raises `KVPassError` for an unknown name or unknown fields."""
    if fields is None:
        return None
    name = fields.get("name")
    if name not in CODECS:
        raise KVPassError(f"There is no codec {shown(name)}; choose one of {sorted(CODECS)}.")
    try:
        return CODECS[name](**{key: value for key, value in fields.items() if key != "name"})
    except TypeError as error:
        raise KVPassError(f"Codec {name!r} does not take these parameters: {error}.") from None
