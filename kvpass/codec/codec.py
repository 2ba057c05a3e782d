"""`Codec`: all that makes one way of storing pages. A subclass is a codec, and its fields are its parameters."""

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
    """One tensor that a codec keeps.

    shape: of one page of one head, or of one head, given the spec and head_dim. Raises `KVPassError` if they do not
        fit.
    dtype: None is that of scales, 16 bits wide (`affine.params_dtype`).
    calibrated: of a sequence's tensors, one that a calibration fills and no prompt changes.
    """

    shape: Callable[[CodecSpec, int], tuple[int, ...]]
    dtype: torch.dtype | None = None
    calibrated: bool = False


NO_KEYS = "Values follow the bit widths of their layer's keys, and those keys were not passed."

CODECS: dict[str, type[Codec]] = {}
"""Codecs by name; "" is `pages.Affine`, which a `Quantizer` without a codec has."""


@dataclass(frozen=True)
class Codec:
    """How the pages of a tensor are stored, and what a cache keeps for it. Subclasses are frozen dataclasses whose
    fields are parameters; they are part of the spec, and of its text. `CodecSpec.codec` is the one of a spec.

    A subclass registers itself by the ``name`` it is given: ``class Boosted(Codec, name="boosted")``.

    tensors: what is kept of each page, in order, ``[B, H_kv, pages, *shape]`` each.
    quantizes_with, dequantizes_with: names of those of the tensors of a sequence and of a model that `quantize` and
        `dequantize` take, in order. Where a spec does not have one it is left out.
    dequantizes_any_bytes: whether `dequantize`, and every kernel that reads these pages, takes any bytes at all in
        place of what is kept and fitted, without an exception or an access out of bounds; values are then arbitrary.
        Servers whose memory is read where nothing is stored yet need it (`kvpass.vllm`). A codec that stores indices
        does not.
    """

    name: ClassVar[str]
    tensors: ClassVar[Mapping[str, Kept]]
    quantizes_with: ClassVar[tuple[str, ...]] = ()
    dequantizes_with: ClassVar[tuple[str, ...]] = ()
    dequantizes_any_bytes: ClassVar[bool] = False

    def __init_subclass__(cls, name: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if name is not None:
            cls.name = name
            CODECS[name] = cls

    def __post_init__(self) -> None:
        check_types(self)

    @classmethod
    def of(cls, spec: CodecSpec) -> Self:
        """The codec of ``spec``. Raises `KVPassError` if it is another one."""
        if not isinstance(spec.codec, cls):
            raise KVPassError(f"This needs Quantizer(..., codec={cls.__name__}(...)), not {shown(spec.codec)}.")
        return spec.codec

    # ------------------------------------------------------------ what it keeps

    def sequence(self, spec: CodecSpec) -> Mapping[str, Kept]:
        """What is kept of each sequence beside its pages, ``[B, H_kv, *shape]`` each: what was fitted to it."""
        return {}

    def model(self, spec: CodecSpec) -> tuple[str, ...]:
        """Names of what a calibration gave the model, which all its caches share, ``[1, H_kv, ...]`` each."""
        return ()

    def page_bytes(self, model: Mapping[str, Tensor], spec: CodecSpec) -> int | None:
        """Bytes of a page, where its size differs between layers and follows from the tensors of the model. Pages are
        then those of all heads together, ``[B, 1, pages, 1, bytes]``. None where `tensors` says the size."""
        return None

    # ------------------------------------------------------------ what it asks for

    @property
    def needs_queries(self) -> bool:
        """Whether it is fitted to the prompt's queries."""
        return False

    @property
    def chooses(self) -> bool:
        """Whether queries, of the prompt or of a calibration, say which tokens of a page get more bits."""
        return False

    @property
    def follows_keys(self) -> bool:
        """Whether the tokens that get more bits are those of the layer's keys: `quantize` then takes `marks` last."""
        return False

    def check(self, spec: CodecSpec) -> None:
        """Raise `KVPassError` for a spec that cannot be stored, when the spec is made."""

    def check_head(self, head_dim: int) -> None:
        """Raise `KVPassError` for heads that cannot be stored."""

    # ------------------------------------------------------------ what it does

    def fit_queries(self, kept: Mapping[str, Tensor], q: Tensor | None, valid: Tensor | None, spec: CodecSpec) -> None:
        """Fit to the prompt's queries before the first token is stored, and write to ``kept``, the tensors of the
        sequence.

        q: ``[B, H_kv, N, D]``, all query heads of a KV head one after the other; None without queries: those that
            `crop` leaves with no page, and codecs that do not ask for any.
        valid: ``[B, N]`` bool, False for padding; None for no padding.
        """

    def fit_tokens(self, kept: Mapping[str, Tensor], x: Tensor, valid: Tensor | None, spec: CodecSpec) -> None:
        """Fit to ``x`` ``[B, H_kv, T, D]``, the tokens that are packed first, as `quantize` will get them, and write to
        ``kept``. valid: ``[B, T]`` bool, as above."""

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Whole pages ``[B, H, N * P, D]`` to what `tensors` names, see `pages.quantize_pages`."""
        raise NotImplementedError

    def dequantize(self, *tensors_and_spec: Any) -> Tensor:
        """What `quantize` returned, the tensors that `dequantizes_with` names, and the spec, to tokens ``[B, H, N * P,
        D]``
        float32."""
        raise NotImplementedError

    def marks(self, pack: Pack, first: int, count: int, spec: CodecSpec) -> Tensor:
        """Which tokens of ``count`` pages from ``first`` on got more bits as keys: ``[B, H, count, P / 8, 1]`` uint8.
        They are the first bytes of the first tensor of a page of keys, ``pack.key_pages``."""
        if pack.key_pages is None:
            raise KVPassError(NO_KEYS)
        pages = whole(pack.key_pages, first + count)[:, :, first : first + count]
        return marks_of(pages, spec.page_size)

    def describe(self, quantizer: str) -> str:
        """How values are quantized, in words, for a quantizer that is described as ``quantizer``."""
        return f"{quantizer} by {self.name}"


def marks_of(pages: Tensor, page_size: int) -> Tensor:
    """Which tokens of pages ``[..., N, 1, bytes]`` have more bits: ``[..., N, P / 8, 1]`` uint8."""
    return pages.squeeze(-2)[..., : byte_rows(page_size, 1)].unsqueeze(-1)


def described(codec: Codec | None) -> dict[str, Any] | None:
    """``codec`` as JSON holds it: its fields, and its name."""
    return None if codec is None else {"name": codec.name, **asdict(codec)}


def codec_from(fields: dict[str, Any] | None) -> Codec | None:
    """Inverse of `described`. Raises `KVPassError` for an unknown name or other fields."""
    if fields is None:
        return None
    name = fields.get("name")
    if name not in CODECS:
        raise KVPassError(f"There is no codec {shown(name)}; choose one of {sorted(CODECS)}.")
    try:
        return CODECS[name](**{key: value for key, value in fields.items() if key != "name"})
    except TypeError as error:
        raise KVPassError(f"Codec {name!r} does not take these parameters: {error}.") from None
