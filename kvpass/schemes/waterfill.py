"""`waterfill`, kvpass's own scheme: bits go to the channels whose errors the prompt's queries would notice, in a basis
fitted to the prompt.

It combines techniques that papers use one at a time, and needs no calibration. Keys are stored before rotary embedding,
minus their mean where channels are steady. Blocks of neighbouring channels are decorrelated (transform coding). Bit
widths per channel follow from what an error costs the prompt's queries (reverse water-filling; SQuat redistributes
errors instead). Tokens whose errors would cost most get one more bit, where ZipCache and QAQ look at attention alone.
Each token has a gain, and there are no group scales. docs/own-scheme.md says what each part is worth.

`waterfill-heads` also divides the bits of a layer among its heads: heads whose attention to packed tokens is
concentrated on a few of them get more (`codec.by_head`).

In latent attention (MLA) queries meet what is expanded from the cache, not the cache. There errors of the latent are
weighted by what they do to keys and values (`codec.expansion`), and all tokens get the same bits. In cross-attention an
encoder's tokens are stored before there are queries: all errors count alike, and all tokens get the same bits.
"""

from dataclasses import dataclass, replace
from math import gcd, log2
from typing import Literal

from ..codec.allocation import SHARES, Allocation
from ..codec.by_head import ByHead
from ..codec.quantizer import Quantizer
from ..codec.shares import Shares
from ..codec.spec import CodecSpec
from ..codec.transform import Transform
from ..codec.transform_coding import PAIRS, WIDEST
from ..errors import KVPassError
from ..fields import check_integers
from ..layout.retention import Retention
from .base import LayerPlan, register_scheme
from .geometry import LayerGeometry
from .storage import StorageConfig

_LONG = 2048  # tokens of a window whose layer is stored like one of full attention
_TOKENS_PER_CHANNEL = 64  # of a window, for each channel of a block
_MORE = 4096  # bit pairs per 16 channels, times tokens, that a shorter window has instead of queries and larger bases

_MORE_OF_LATENT = 2  # bit pairs per 16 channels: a latent is keys and values at once

_Fields = tuple[int, int]


def _alike(poor: _Fields, rich: _Fields) -> _Fields:
    """Pairs and single bits of tokens that are treated alike: the mean of those of the two halves of a page."""
    return poor if rich == (0, 0) else ((poor[0] + rich[0]) // 2, (poor[1] + rich[1]) // 2)


def _at_most(pairs: int, singles: int) -> _Fields:
    return min(pairs, PAIRS * SHARES), min(singles, SHARES)


@register_scheme(
    waterfill_2=dict(key_fields=(8, 4), value_fields=(6, 4), rich_key_fields=(16, 4), rich_value_fields=(15, 4)),
    waterfill_3=dict(key_fields=(17, 4), value_fields=(14, 4), rich_key_fields=(25, 4), rich_value_fields=(22, 4)),
    waterfill_heads=dict(by_head=True, value_fields=(10, 4)),
)
@dataclass(frozen=True, kw_only=True)
class WaterfillConfig(StorageConfig):
    """``(2 * pairs + singles) / 16`` bits per value, averaged over the two halves of a page, plus ``9 / head_dim`` for
    gains and halves, plus the exact tokens.

    recent: number of newest tokens whose keys and values are always exact, besides those that wait until ``residual``
        of them fill a page.
    key_fields, value_fields: how many 2-bit and how many 1-bit fields every 16 channels share.
    rich_key_fields, rich_value_fields: the same for the half of a page's tokens whose errors would cost most, by the
        attention of the prompt's queries, that of later ones, and the size of the tokens (`codec.token_ranks.choose`);
        (0, 0) treats all tokens alike.
    block_size: number of neighbouring channels that are decorrelated together, reduced to a divisor of the head if
        needed; 1 keeps channels as they are.
    weighted: weight key errors by their effect on the prompt's queries instead of equally in all channels.
    center: subtract the mean of the first packed keys from all keys.
    by_head: divide the bits of a layer among its heads by how concentrated the prompt's attention is, instead of giving
        all heads equally many. Layers with a sliding window, a latent or one KV head, and those of cross-attention, are
        stored as without it.
    """

    name = "waterfill"
    takes_calibration = True

    sinks: int = 4
    recent: int = 96
    rope: Literal["post", "pre"] = "pre"
    key_fields: tuple[int, int] = (10, 4)
    value_fields: tuple[int, int] = (9, 4)
    rich_key_fields: tuple[int, int] = (18, 4)
    rich_value_fields: tuple[int, int] = (18, 4)
    block_size: int = 32
    weighted: bool = True
    center: bool = True
    by_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, recent=0)
        if self.by_head and not (any(self.rich_key_fields) and any(self.rich_value_fields)):
            raise KVPassError("by_head=True needs per-token bit widths: set rich_key_fields and rich_value_fields.")
        self._plan(1, 1)
        self._latent_plan(1, 1)

    def _policy(self) -> Retention:
        return self.retention or Retention(self.recent + self.residual, self.residual, self.sinks)

    def _quantizer(
        self, head_dim: int, fields: _Fields, weighted: bool | Literal["optional"] = False, rich: _Fields = (0, 0),
        follows: bool = False,
    ) -> Quantizer:  # fmt: skip
        codec = ByHead if self.by_head and any(rich) else Allocation
        allocation = codec(*fields, gcd(self.block_size, head_dim), weighted, *rich, follows)
        return Quantizer(8, "token", head_dim, codec=allocation)

    def _plan(self, head_dim: int, value_head_dim: int) -> LayerPlan:
        page_rope = self.rope == "pre" and self.retention is None  # otherwise the tokens of a page are not neighbours
        keys = self._quantizer(head_dim, self.key_fields, self.weighted, self.rich_key_fields)
        follows = any(self.rich_value_fields)
        values = self._quantizer(value_head_dim, self.value_fields, False, self.rich_value_fields, follows)
        return LayerPlan(
            CodecSpec(keys, self.key_retention(), self.key_transform(center=self.center, page_rope=page_rope)),
            CodecSpec(values, self.value_retention()),
        )

    def _latent_plan(self, latent_dim: int, rotary_dim: int) -> LayerPlan:
        pairs, singles = _alike(self.key_fields, self.rich_key_fields)
        latent, rotary = _at_most(pairs + _MORE_OF_LATENT, singles), (pairs, singles)
        of_latent = self._quantizer(latent_dim, latent, self.weighted and "optional")
        return LayerPlan(
            CodecSpec(of_latent, self.key_retention(), Transform(center=self.center)),
            CodecSpec(self._quantizer(rotary_dim, rotary), self.value_retention()),
        )

    def _cross_plan(self, head_dim: int, value_head_dim: int) -> LayerPlan:
        keys = self._quantizer(head_dim, _alike(self.key_fields, self.rich_key_fields))
        values = self._quantizer(value_head_dim, _alike(self.value_fields, self.rich_value_fields))
        all_at_once = replace(self, recent=0)  # no token of an encoder is newer than the others
        return LayerPlan(
            CodecSpec(keys, all_at_once.key_retention(), Transform(center=self.center)),
            CodecSpec(values, all_at_once.value_retention()),
        )

    def _in_window(self, window: int) -> "WaterfillConfig":
        """The scheme of layers with a window of ``window`` tokens. Few tokens share what is stored once, so they have
        smaller blocks, and ranks only if the window is long; the memory that this saves goes to their codes."""
        channels = max(1, window // _TOKENS_PER_CHANNEL)
        block_size = min(self.block_size, 1 << channels.bit_length() - 1)  # a power of two
        if window >= _LONG:
            return replace(self, block_size=block_size)
        alike = _alike(self.key_fields, self.rich_key_fields), _alike(self.value_fields, self.rich_value_fields)
        keys, values = (_at_most(pairs + _MORE // window, singles) for pairs, singles in alike)
        return replace(
            self, block_size=block_size, key_fields=keys, value_fields=values, rich_key_fields=(0, 0),
            rich_value_fields=(0, 0), by_head=False,
        )  # fmt: skip

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        here = self if layer.window is None else self._in_window(layer.window)
        if layer.num_key_value_heads == 1 or layer.cross:
            here = replace(here, by_head=False)
        plan = here._latent_plan if layer.latent else here._cross_plan if layer.cross else here._plan
        return plan(layer.head_dim, layer.value_head_dim).checked(layer)

    def to_calibrate(self) -> "CalibratedWaterfillConfig":
        """The static calibrated form, with the same tokens exact."""
        same = {name: getattr(self, name) for name in ("residual", "sinks", "recent", "retention", "block_size")}
        return CalibratedWaterfillConfig(**same, ranked=any(self.rich_key_fields))


_TOKENS = 8192  # length of the cache whose bits a calibration divides between sliding windows and full attention


def share_of_tokens(layer: LayerGeometry) -> float:
    """The share of the tokens of a long cache that ``layer`` stores: less than 1 with a sliding window."""
    return min(layer.window or _TOKENS, _TOKENS) / _TOKENS


@register_scheme(waterfill_hybrid=dict(form="hybrid", bits=2.0))
@dataclass(frozen=True, kw_only=True)
class CalibratedWaterfillConfig(StorageConfig):
    """`WaterfillConfig` with the bits of every head, for keys and values, set by a calibration: ``bits`` per value on
    average over the model, plus ``17 / head_dim / 2`` for gains and halves, plus the exact tokens.

    form: "static" takes mean, basis and bit widths from the calibration, in tensors that all caches of the model share,
        so a cache keeps only pages and exact tokens. "hybrid" fits them to the tokens packed first, under the metric of
        the calibration and with its number of bits per head.
    bits: bits of quantized values, 0 to 7.
    recent: number of newest tokens that are always exact, besides those that wait until ``residual`` of them fill a
        page.
    block_size: number of neighbouring channels that are decorrelated together, reduced to a divisor of the head if
        needed.
    ranked: give more bits to the half of a page's tokens whose errors would cost most under the calibration's queries.
    ropes: how the keys of each layer are rotated (`kvpass.codec.rope`), "" for layers without positions;
        `kvpass.calibrate` fills it in.
    """

    name = "waterfill-static"
    needs_calibration = takes_calibration = True
    stores_layers_alone = False  # bits are distributed over all layers

    sinks: int = 4
    recent: int = 96
    form: Literal["static", "hybrid"] = "static"
    bits: float = 2.06
    block_size: int = 32
    ranked: bool = True
    ropes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, recent=0)
        if not 0 < self.bits <= WIDEST:
            raise KVPassError(
                f"bits={self.bits} must be above 0 and at most {WIDEST}: it is the mean bit width of all coordinates."
            )
        if self.rope != "post":
            raise KVPassError(
                "This scheme stores keys with page-relative RoPE, after rotary embedding: leave rope='post'."
            )
        if self.retention is not None and (self.retention.evicts or self.retention.keep != "recent"):
            raise KVPassError(
                "The tokens of a page must be consecutive: use a retention that neither evicts nor thins out tokens."
            )
        self._plan(self.block_size, self.block_size, "")

    def expected_bits(self, layer: LayerGeometry) -> float:
        """The mean bit width to expect in ``layer``, whose bits take less memory if it has a sliding window: errors are
        divided by 4 per bit, so a quarter of the memory buys a bit more."""
        return min(self.bits - log2(share_of_tokens(layer)) / 2, WIDEST)

    def _policy(self) -> Retention:
        return self.retention or Retention(self.recent + self.residual, self.residual, self.sinks)

    def _plan(self, head_dim: int, value_head_dim: int, rope: str) -> LayerPlan:
        def spec(head_dim: int, follows: bool, transform: Transform) -> CodecSpec:
            shares = Shares(gcd(self.block_size, head_dim), self.ranked, follows, self.form == "hybrid")
            return CodecSpec(Quantizer(8, "token", head_dim, codec=shares), self._policy(), transform)

        return LayerPlan(
            spec(head_dim, False, Transform(center=True, page_rope=bool(rope), numbered=rope)),
            spec(value_head_dim, self.ranked, Transform()),
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        rope = self.ropes[layer.index] if layer.index < len(self.ropes) else ""
        return self._plan(layer.head_dim, layer.value_head_dim, rope).checked(layer)
