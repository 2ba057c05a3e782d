"""`CodecSpec`: everything an op needs to know about how one tensor (K or V of a layer) is stored."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Literal

from ..errors import KVPassError
from ..fields import check_integers, check_types
from .bitpack import byte_rows, smallest_page
from .codebook import grid_shape
from .predictor import looks_below, parse_predictor

UNIFORM = (1, 2, 3, 4, 8)
"""Widths of uniform codes."""
RAW = (16, 32)
"""Widths that are floats stored as they are."""


_MOST_TOKENS = 1 << 24
"""Tokens that a window, with the sinks, or a budget may have: memory for them is taken at once."""
_MOST_WEIGHT = 1e6


@dataclass(frozen=True)
class Subspace:
    """Query-subspace error compensation (SQuat, arXiv 2503.24358, eq. 6).

    rank: directions kept of the prompt's queries.
    weight: weight of the subspace error against the plain error. ``relative=True``: in units of the mean query energy
        per channel, which depends neither on the prompt's length nor on the scale of the queries. ``relative=False``:
        the paper's lambda, which multiplies squared singular values.
    block_size: channels quantized at a time; later blocks absorb the error of earlier ones.
    """

    rank: int
    weight: float
    relative: bool
    block_size: int

    def __post_init__(self):
        check_types(self)
        check_integers(self, rank=1, block_size=1)
        if not 0 <= self.weight <= _MOST_WEIGHT:
            raise KVPassError(
                f"The subspace weight (strength or lam) must be a finite number, not negative, and at most "
                f"{_MOST_WEIGHT:g}: {self.weight}."
            )


@dataclass(frozen=True)
class Adaptive:
    """A width for every token, from the deviation its error may have (QAQ, arXiv 2403.04643; `codec.adaptive`).

    widths: classes of widths, narrowest first; four at most.
    role: what the tokens are, "key" or "value": it decides what they may deviate by.
    sigma: deviation allowed of attention weights, for keys; of attention's output, for values.
    outliers: share of a token's values that are kept exact, half of them at both ends.
    rows: queries whose largest attention weight stands for what a token will be paid.
    energy: squared norm of the scaled queries; None takes the 90 % quantile of the prompt's.
    keep_originals: keep full-precision tokens in host memory, so that a token can get bits back.
    """

    widths: tuple[int, ...]
    role: Literal["key", "value"]
    sigma: float
    outliers: float
    rows: int
    energy: float | None = None
    keep_originals: bool = True

    def __post_init__(self):
        check_types(self)
        steps = [b - a for a, b in zip((0, *self.widths), self.widths, strict=False)]
        if not 1 <= len(self.widths) <= 4 or not set(steps) <= set(UNIFORM) or self.widths[-1] > 8:
            raise KVPassError(
                f"widths={self.widths}: one to four widths up to 8 bits, each larger than the one before by one of "
                f"{list(UNIFORM)}."
            )
        check_integers(self, rows=1)
        if not 0 <= self.outliers <= 1:
            raise KVPassError(f"outliers={self.outliers}: a share of the values is in [0, 1].")
        for name, value in (("sigma", self.sigma), ("query_energy", self.energy)):
            if value is not None and not 0 < value <= _MOST_WEIGHT:
                raise KVPassError(f"{name}={value} must be above 0, and at most {_MOST_WEIGHT:g}.")


@dataclass(frozen=True)
class CodecSpec:
    """Storage of one logical ``[B, H_kv, S, D]`` tensor.

    bits: 1, 2, 3, 4 or 8; 16 or 32 are the floats themselves, as bytes.
    per: "channel" shares a scale among ``group_size`` tokens of one channel; "token" among ``group_size`` channels of
        one token.
    page_size: tokens packed at a time, written once.
    residual: tokens that always stay in full precision behind the newest one; a page leaves the window when
        ``residual + page_size`` tokens are in it.
    sinks: first tokens, never packed.
    rollback: tokens that `crop` can take back without loss across a flush.
    keep: which of the exact tokens stay when a page leaves: the "recent" ones, or a "log"-sparse choice of LogQuant
        (then ``residual`` is twice ``page_size``).
    fit: "minmax" spans the group; "lsq" takes the scale and zero point of least squared error.
    eta: share of the range cut off at both ends after codes are assigned (XQuant eq. 9); "minmax" only.
    own_codes: weight of this tensor's codes where another layer's are in the pool already (XQuant): 1 stores its own, 0
        keeps the others and only its own scale and zero point, anything between averages the two.
    pre_rope: the tokens are keys as they were before the rotary embedding.
    rotation: seed of a random-sign Hadamard rotation of the channels (`codec.hadamard`); None for none.
    grid: name of a vector grid (`codec.codebook`) whose points are the codes; "" for uniform codes. ``bits`` is then
        the width of the code of d values, and groups have a scale and no zero point.
    predictor: what is subtracted before encoding and added after decoding (`codec.predictor`): "" nothing, "mean" the
        mean of the tokens packed first, or a function of the layer below: "linear", "low-rank", "mlp", and each with
        "-4" behind it for weights of 4 bits.
    budget: packed tokens kept at most, a multiple of ``page_size``; None for all. What is over is evicted `rollback`
        tokens after its page was due, and ``S`` stored tokens become ``stored(S)``.
    evict: who is: the tokens with the least "attention" paid to them so far, or the oldest ("age").
    codec: name of the codec of its pages, if it is not one of these (`codec.kept`).
    shared_eviction: one choice for all heads and layers, where they need the same tokens; otherwise each KV head has
        its own.
    """

    bits: int
    per: Literal["channel", "token"]
    group_size: int
    page_size: int
    residual: int = 0
    sinks: int = 0
    rollback: int = 16
    keep: Literal["recent", "log"] = "recent"
    fit: Literal["minmax", "lsq"] = "minmax"
    eta: float = 0.0
    own_codes: float = 1.0
    pre_rope: bool = False
    rotation: int | None = None
    grid: str = ""
    predictor: str = ""
    budget: int | None = None
    evict: Literal["attention", "age"] = "attention"
    shared_eviction: bool = False
    codec: str = ""
    subspace: Subspace | None = None
    adaptive: Adaptive | None = None

    def __post_init__(self):
        check_types(self)
        check_integers(self, bits=1, group_size=1, page_size=1, residual=0, sinks=0, rollback=0)
        if max(self.sinks + self.window, self.budget or 0) > _MOST_TOKENS:
            raise KVPassError(f"Windows, sinks and budgets are at most {_MOST_TOKENS:,} tokens: ask for fewer.")
        if self.grid:
            self._check_grid()
        elif self.bits not in UNIFORM and not self.raw:
            raise KVPassError(f"bits={self.bits}: packed widths are {list(UNIFORM)}.")
        multiple = 1 if self.raw else smallest_page(self.bits)
        if self.page_size % multiple:
            raise KVPassError(
                f"page_size={self.page_size} does not fill whole bytes at {self.bits} bits: use a multiple of "
                f"{multiple}."
            )
        if self.per == "channel" and self.page_size % self.group_size:
            raise KVPassError(
                f"group_size={self.group_size} does not divide page_size={self.page_size}: K groups run along tokens, "
                "so a page must hold whole groups. Choose a residual that is a multiple of the group size."
            )
        if self.subspace is not None and self.per != "channel":
            raise KVPassError("Subspace compensation is defined for per-channel keys.")
        if self.keep == "log" and self.residual != 2 * self.page_size:
            raise KVPassError(
                f"Log-sparse windows keep 2W tokens and move W at a time: residual={self.residual} must "
                f"be twice page_size={self.page_size}."
            )
        if looks_below(self.predictor):
            parse_predictor(self.predictor)
        if self.predictor and self.own_codes != 1:
            raise KVPassError("Codes of what a predictor left over are not shared between layers.")
        self._check_fit()
        if self.codec and (self.budget is not None or self.own_codes != 1 or self.adaptive is not None):
            raise KVPassError(f"Only built-in codecs evict, share codes or choose widths, and {self.codec!r} is none.")
        if self.adaptive is not None and (self.budget is not None or self.keep != "recent" or self.pre_rope):
            raise KVPassError(
                "Tokens with widths of their own are not evicted, thinned out or stored before rotary embedding: use a "
                "plain window, and rope='post'."
            )
        if self.budget is not None:
            self._check_eviction()

    def _check_eviction(self) -> None:
        check_integers(self, budget=0)
        if self.budget % self.page_size or self.rollback > self.page_size:
            raise KVPassError(
                f"budget={self.budget} must be a multiple of page_size={self.page_size}, and rollback={self.rollback} "
                "at most that: tokens are evicted a page at a time."
            )
        if self.keep != "recent":
            raise KVPassError("Tokens that thin out with distance and eviction are two choices of what stays: use one.")
        if self.own_codes != 1:
            raise KVPassError("Layers that share codes cannot evict: each layer's tokens would have to be the other's.")
        if not self.shared_eviction and (self.pre_rope or looks_below(self.predictor)):
            what = "Keys before rotary embedding share one table of positions"
            what = "A layer is predicted from the same tokens of the layer below" if self.predictor else what
            raise KVPassError(
                f"{what}, so all heads and layers must keep the same tokens: use HeavyHitter(..., shared=True)."
            )

    def _check_grid(self) -> None:
        dim, bits = grid_shape(self.grid)
        if self.bits != bits or self.per != "token" or self.group_size % dim:
            raise KVPassError(
                f"Grid {self.grid!r} takes codes of {bits} bits for {dim} channels, and groups per token of a multiple "
                f"of {dim}; this is bits={self.bits}, per={self.per!r}, group_size={self.group_size}."
            )
        if self.eta or self.own_codes != 1:
            raise KVPassError("Codes of a grid have no range to cut, and are not shared between layers.")

    def _check_fit(self) -> None:
        if not 0 <= self.eta < 0.5:
            raise KVPassError(f"eta={self.eta}: the share cut off at each end of the range is in [0, 0.5).")
        if not 0 <= self.own_codes <= 1:
            raise KVPassError(f"own_codes={self.own_codes}: the weight of a layer's own codes is in [0, 1].")
        if self.fit == "lsq" and not self.grid and (self.eta or self.bits > 4):
            raise KVPassError(
                "fit='lsq' finds the best range itself, for up to 4 bits: use eta=0 with it, or fit='minmax'."
            )
        if self.raw and (
            self.subspace or self.rotation is not None or self.fit != "minmax" or self.eta or self.own_codes != 1
        ):
            raise KVPassError(f"bits={self.bits} stores floats as they are: there is nothing to fit or to share.")

    def check(self, head_dim: int) -> None:
        """Raise `KVPassError` unless heads of ``head_dim`` channels can be stored."""
        if self.raw:
            return  # no groups
        if self.adaptive is not None and (head_dim % 8 or self.page_size % 4):
            raise KVPassError(f"Planes of bits need a head_dim of a multiple of 8 ({head_dim}), and pages of 4 tokens.")
        if self.per == "token" and head_dim % self.group_size:
            raise KVPassError(
                f"group_size={self.group_size} does not divide head_dim={head_dim}: per-token groups run along "
                f"channels. Use a divisor of {head_dim}."
            )
        if self.subspace is not None and head_dim % self.subspace.block_size:
            raise KVPassError(f"block_size={self.subspace.block_size} does not divide head_dim={head_dim}.")

    @property
    def raw(self) -> bool:
        """Whether pages hold the floats themselves."""
        return self.bits in RAW

    @cached_property
    def window(self) -> int:
        """Ring slots after the sinks."""
        return self.residual + self.page_size + self.rollback

    @cached_property
    def dim(self) -> int:
        """Values of one code."""
        return grid_shape(self.grid)[0] if self.grid else 1

    def columns(self, head_dim: int) -> int:
        """Codes of one token."""
        return head_dim // self.dim

    @cached_property
    def rows(self) -> int:
        """Byte rows of a page."""
        return byte_rows(self.page_size, self.bits)

    def packed(self, length: int) -> int:
        """Tokens in pages once ``length`` tokens are stored: those at ``[sinks, sinks + packed)``."""
        return max(0, length - self.sinks - self.residual) // self.page_size * self.page_size

    @property
    def needs_queries(self) -> bool:
        """Whether storing depends on the prompt's queries."""
        adaptive = self.adaptive is not None and self.adaptive.role == "key" and self.adaptive.energy is None
        return self.subspace is not None or adaptive

    @property
    def needs_importance(self) -> bool:
        """Whether storing depends on the attention that tokens are paid."""
        return self.budget is not None or self.adaptive is not None

    @property
    def retained_as(self) -> tuple:
        """What decides where a token lives: states that agree in it hold the same tokens."""
        return self.page_size, self.residual, self.sinks, self.rollback, self.keep, self.budget, self.evict

    def evicted(self, length: int) -> int:
        """How many of ``length`` tokens are dropped, were they stored: `rollback` tokens late, so that `crop` never
        needs one of them."""
        return 0 if self.budget is None else max(0, self.packed(length - self.rollback) - self.budget)

    def stored(self, length: int) -> int:
        """What ``length`` tokens shrink to."""
        return length - self.evicted(length)

    def pages(self, length: int) -> int:
        """Pages in use once ``length`` tokens are stored."""
        return self.packed(length) // self.page_size

    def params_shape(self, head_dim: int) -> tuple[int, int]:
        """Trailing shape of the scales of one page."""
        if self.raw:
            return 0, head_dim
        if self.per == "channel":
            return self.page_size // self.group_size, head_dim
        return self.page_size, head_dim // self.group_size

    def zero_shape(self, head_dim: int) -> tuple[int, int]:
        """Trailing shape of the zero points of one page."""
        return (0, head_dim) if self.grid else self.params_shape(head_dim)

    @cached_property
    def features(self) -> frozenset[str]:
        """What serving this spec takes beside its sizes, such as "bits=2" and "rotation": every field that is not its
        default, so that nobody serves a field somebody adds who does not list it."""
        return frozenset(_features(self))

    @cached_property
    def _hash(self) -> int:
        return hash(str(self))

    def __hash__(self) -> int:  # specs are keys of caches on the path of every step
        return self._hash

    @cached_property
    def stored_as(self) -> "CodecSpec":
        """What reading depends on: the spec without how codes, scales and zero points were found."""
        return replace(self, **{f.name: f.default for f in fields(self) if f.name in _OF_STORING})

    def __str__(self) -> str:
        """The canonical text that travels through op schemas and into compile-cache keys; `parse` inverts it."""
        return json.dumps(asdict(self), separators=(",", ":"))


_SIZES = ("group_size", "page_size", "residual", "sinks", "rollback")
_CHOICES = ("bits", "per", "keep", "fit", "predictor", "evict", "codec")  # every value is a feature
_OF_STORING = ("fit", "eta", "own_codes", "subspace", "budget", "evict", "shared_eviction")


def _features(spec: CodecSpec) -> Iterator[str]:
    for field in fields(spec):
        name, value = field.name, getattr(spec, field.name)
        if name in _SIZES or value == field.default:
            continue
        yield f"{name}={value}" if name in _CHOICES else name
        if is_dataclass(value):  # of its fields, those that may be left out
            optional = (inner for inner in fields(value) if inner.default is not MISSING)
            yield from (f"{name}.{inner.name}" for inner in optional if getattr(value, inner.name) != inner.default)


@cache
def parse(text: str) -> CodecSpec:
    """The `CodecSpec` that ``str(spec)`` wrote."""
    fields = json.loads(text)
    subspace, adaptive = fields.pop("subspace"), fields.pop("adaptive")
    return CodecSpec(
        **fields,
        subspace=Subspace(**subspace) if subspace else None,
        adaptive=Adaptive(**adaptive) if adaptive else None,
    )
