"""Our own: bits go to the channels whose errors the prompt's queries would see, in a basis fitted to the prompt.

Levers that papers have one at a time, and no calibration: keys before rotary embedding, less their mean, where channels
are steady; blocks of neighbouring channels decorrelated (transform coding); widths by channel, by what an error costs
the prompt's queries (reverse water-filling, where SQuat moves errors about); a bit more for the tokens that those would
look at (as ZipCache and QAQ have it); and a gain for each token, no scales of groups. docs/own-scheme.md has what each
is worth.
"""

from dataclasses import dataclass
from math import gcd
from typing import Literal

from ..codec.allocation import Allocation
from ..codec.quantizer import Quantizer
from ..codec.shares import WIDEST, Shares
from ..codec.spec import CodecSpec
from ..codec.transform import Transform
from ..errors import KVPassError
from ..fields import check_integers
from ..layout.retention import Retention
from .base import LayerGeometry, LayerPlan, register_scheme
from .storage import StorageConfig


@register_scheme(
    waterfill_2=dict(key_fields=(8, 4), value_fields=(6, 4), rich_key_fields=(16, 4), rich_value_fields=(15, 4)),
    waterfill_3=dict(key_fields=(17, 4), value_fields=(14, 4), rich_key_fields=(25, 4), rich_value_fields=(22, 4)),
)
@dataclass(frozen=True, kw_only=True)
class WaterfillConfig(StorageConfig):
    """``(2 * pairs + singles) / 16`` bits a value, on average of the two halves of a page, ``9 / head_dim`` for gains
    and halves, and the exact tokens.

    recent: tokens that are always exact behind the newest, of keys and values, besides those that wait until there are
        ``residual`` for a page.
    key_fields, value_fields: of 16 channels, how many pairs of bits they share, and how many single bits.
    rich_key_fields, rich_value_fields: the same, of the half of a page's tokens that the prompt's queries would pay
        most; (0, 0) for tokens that are all alike.
    block_size: neighbouring channels that are decorrelated together, or as many as divide both it and the head; 1 takes
        channels as they are.
    weighted: errors in keys cost what the prompt's queries make of them, instead of the same in all channels.
    center: the mean of the keys that are packed first is subtracted from all.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, recent=0)
        self._plan(1)

    def _policy(self) -> Retention:
        return self.retention or Retention(self.recent + self.residual, self.residual, self.sinks)

    def _plan(self, head_dim: int) -> LayerPlan:
        def quantizer(fields: tuple[int, int], weighted: bool, rich: tuple[int, int], follows: bool) -> Quantizer:
            allocation = Allocation(*fields, gcd(self.block_size, head_dim), weighted, *rich, follows)
            return Quantizer(8, "token", head_dim, codec=allocation)

        framed = self.rope == "pre" and self.retention is None  # a page of which is no neighbours otherwise
        keys = quantizer(self.key_fields, self.weighted, self.rich_key_fields, False)
        values = quantizer(self.value_fields, False, self.rich_value_fields, any(self.rich_value_fields))
        return LayerPlan(
            CodecSpec(keys, self.key_retention(), self.key_transform(center=self.center, page_frame=framed)),
            CodecSpec(values, self.value_retention()),
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        return self._plan(layer.head_dim).checked(layer)

    def to_calibrate(self) -> "CalibratedWaterfillConfig":
        """The static form with the same tokens exact."""
        same = {name: getattr(self, name) for name in ("residual", "sinks", "recent", "retention", "block_size")}
        return CalibratedWaterfillConfig(**same, ranked=any(self.rich_key_fields))


@register_scheme(waterfill_hybrid=dict(form="hybrid", bits=1.9))
@dataclass(frozen=True, kw_only=True)
class CalibratedWaterfillConfig(StorageConfig):
    """`WaterfillConfig` with the bits of every head, of keys and of values, given by a calibration: ``bits`` a value on
    average over the model, ``17 / head_dim / 2`` for gains and halves, and the exact tokens.

    form: "static", and mean, basis and widths are the model's, in tensors that all its caches share, so that a cache
        keeps pages and exact tokens alone; "hybrid", and they are fitted to the tokens packed first, under the
        metric of the calibration, with as many bits a head as it says.
    bits: of codes, 0 to 7.
    recent: tokens that are always exact behind the newest, besides those that wait until there are ``residual``.
    block_size: neighbouring channels that are decorrelated together, or as many as divide both it and the head.
    ranked: the half of a page's tokens that the calibration's queries would pay most gets more bits than the rest.
    ropes: how the keys of each layer of the model are turned (`kvpass.codec.rope`), "" for layers without positions;
        `kvpass.calibrate` finds out.
    """

    name = "waterfill-static"
    needs_calibration = takes_calibration = True
    stores_layers_alone = False  # their bits are shared out over all

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
        self._plan(self.block_size, "")

    def _policy(self) -> Retention:
        return self.retention or Retention(self.recent + self.residual, self.residual, self.sinks)

    def _plan(self, head_dim: int, rope: str) -> LayerPlan:
        def spec(follows: bool, transform: Transform) -> CodecSpec:
            shares = Shares(gcd(self.block_size, head_dim), self.ranked, follows, self.form == "hybrid")
            return CodecSpec(Quantizer(8, "token", head_dim, codec=shares), self._policy(), transform)

        return LayerPlan(
            spec(False, Transform(center=True, page_frame=bool(rope), numbered=rope)), spec(self.ranked, Transform())
        )

    def plan(self, layer: LayerGeometry) -> LayerPlan:
        rope = self.ropes[layer.index] if layer.index < len(self.ropes) else ""
        return self._plan(layer.head_dim, rope).checked(layer)
