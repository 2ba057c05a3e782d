"""`Quantizer`: how values become codes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..errors import KVPassError
from ..fields import check_integers, check_types, fields_alone, hash_once
from .codebook import grid_shape

UNIFORM = (1, 2, 3, 4, 8)
"""Widths of uniform codes."""
RAW = (16, 32)
"""Widths that are floats stored as they are."""
_MOST_WEIGHT = 1e6
SHARES = 16
"""Channels that `Allocation` counts fields of."""
PAIRS = 3
"""Pairs of bits of the widest channels of an `Allocation`, which have 6 or 7."""
RICH = 2
"""Of so many tokens of a page an `Allocation` may give more bits to one."""
QUERIES = 32
"""Those of the prompt's queries that say to which."""


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

    def __post_init__(self) -> None:
        check_types(self)
        check_integers(self, rank=1, block_size=1)
        if not 0 <= self.weight <= _MOST_WEIGHT:
            raise KVPassError(
                f"The subspace weight (strength or lam) must be a finite number from 0 to {_MOST_WEIGHT:g}, not "
                f"{self.weight}."
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

    def __post_init__(self) -> None:
        check_types(self)
        steps = [b - a for a, b in zip((0, *self.widths), self.widths, strict=False)]
        if not 1 <= len(self.widths) <= 4 or not set(steps) <= set(UNIFORM) or self.widths[-1] > 8:
            raise KVPassError(
                f"widths={self.widths} must be one to four bit widths up to 8. Each must exceed the previous one by "
                f"one of {list(UNIFORM)}."
            )
        check_integers(self, rows=1)
        if not 0 <= self.outliers <= 1:
            raise KVPassError(f"outliers={self.outliers} must be a fraction of the values, in [0, 1].")
        for name, value in (("sigma", self.sigma), ("query_energy", self.energy)):
            if value is not None and not 0 < value <= _MOST_WEIGHT:
                raise KVPassError(f"{name}={value} must be above 0 and at most {_MOST_WEIGHT:g}.")

    @property
    def fits_energy(self) -> bool:
        """Whether the energy is that of the prompt's queries."""
        return self.role == "key" and self.energy is None


@dataclass(frozen=True)
class Allocation:
    """Widths by channel, in a basis that is fitted to the tokens packed first (`codec.allocation`), and by token.

    pairs, singles: of 16 channels, how many pairs of bits they share, and how many single bits; (2 * pairs + singles) /
        16 bits a value. A channel has at most one single bit, so that many have an odd width.
    block_size: neighbouring channels that are decorrelated together; 1 takes channels as they are.
    weighted: errors cost what the prompt's queries make of them; otherwise the same in all channels.
    rich_pairs, rich_singles: the same as ``pairs`` and ``singles``, of the half of a page's tokens that attention
        pays most; 0 and 0 for a page of tokens that are all alike.
    follows: that half is the one of the layer's keys; otherwise it is chosen by the prompt's queries.
    """

    pairs: int
    singles: int
    block_size: int
    weighted: bool
    rich_pairs: int = 0
    rich_singles: int = 0
    follows: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_integers(self, pairs=1, singles=0, block_size=1, rich_pairs=0, rich_singles=0)
        for pairs, singles in self._shares:
            if pairs > PAIRS * SHARES or singles > SHARES:
                raise KVPassError(
                    f"pairs={pairs}, singles={singles}: {SHARES} channels take at most {PAIRS * SHARES} pairs of bits "
                    f"and {SHARES} single bits."
                )
        if self.ranked and not self.rich_pairs:
            raise KVPassError("rich_pairs=0: per-token bit widths need at least one pair of bits.")
        if self.follows and not self.ranked:
            raise KVPassError("follows=True needs per-token bit widths: set rich_pairs or rich_singles.")

    @property
    def ranked(self) -> bool:
        """Whether some tokens of a page have other widths than the rest."""
        return bool(self.rich_pairs or self.rich_singles)

    @property
    def chooses(self) -> bool:
        """Whether it looks at the prompt's queries to say which tokens those are."""
        return self.ranked and not self.follows

    @property
    def _shares(self) -> list[tuple[int, int]]:
        plain, rich = (self.pairs, self.singles), (self.rich_pairs, self.rich_singles)
        return [rich, plain] if self.ranked else [plain]

    def tokens(self, page_size: int) -> list[int]:
        """How many tokens of a page there are of each rank, richest first."""
        return [page_size // RICH, page_size - page_size // RICH] if self.ranked else [page_size]

    def counts(self, head_dim: int) -> list[tuple[int, int]]:
        """How many pairs of bits, and how many single bits, a token of ``head_dim`` channels has, by rank."""
        return [(pairs * head_dim // SHARES, singles * head_dim // SHARES) for pairs, singles in self._shares]

    def fields(self, head_dim: int) -> list[int]:
        """How many fields, of either kind, a token has, by rank."""
        return [sum(counts) for counts in self.counts(head_dim)]

    @property
    def bits(self) -> float:
        """Bits a value, on average."""
        each = [(2 * pairs + singles) / SHARES for pairs, singles in self._shares]
        return each[0] / RICH + each[1] * (1 - 1 / RICH) if self.ranked else each[0]

    def check(self, head_dim: int) -> None:
        """Raise `KVPassError` unless heads of ``head_dim`` channels have whole blocks, and whole shares."""
        for name, size in (("block_size", self.block_size), (str(SHARES), SHARES)):
            if head_dim % size:
                raise KVPassError(f"{name}={size} does not divide head_dim={head_dim}.")


@dataclass(frozen=True)
class Shares:
    """Widths by channel, where a calibration gave each head its bits (`codec.shares`).

    block_size: neighbouring channels that are decorrelated together.
    ranked: the half of a page's tokens that the calibration's queries would pay most has bits of its own.
    follows: that half is the one of the layer's keys.
    adapts: mean, basis and widths within a head are fitted to the tokens packed first, under the metric of the
        calibration; otherwise all of it is the calibration's.
    """

    block_size: int
    ranked: bool = True
    follows: bool = False
    adapts: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_integers(self, block_size=1)
        if self.follows and not self.ranked:
            raise KVPassError("follows=True needs per-token bit widths: set ranked=True.")

    @property
    def chooses(self) -> bool:
        """Whether queries say which tokens those are."""
        return self.ranked and not self.follows

    @property
    def ranks(self) -> int:
        """Groups of tokens of a page that have widths of their own."""
        return 2 if self.ranked else 1

    def tokens(self, page_size: int) -> list[int]:
        """How many tokens of a page there are of each rank, richest first."""
        return [page_size // RICH, page_size - page_size // RICH] if self.ranked else [page_size]


@dataclass(frozen=True)
class Quantizer:
    """How values become codes, and codes values again.

    bits: 1, 2, 3, 4 or 8; 16 or 32 are the floats themselves, as bytes.
    per: "channel" shares a scale among ``group_size`` tokens of one channel; "token" among ``group_size`` channels of
        one token.
    fit: "minmax" spans the group; "lsq" takes the scale and zero point of least squared error.
    eta: share of the range cut off at both ends after codes are assigned (XQuant eq. 9); "minmax" only.
    grid: name of a vector grid (`codec.codebook`) whose points are the codes; "" for uniform codes. ``bits`` is then
        the width of the code of d values, and groups have a scale and no zero point.
    subspace: errors of channels are made up for by later ones, where queries see them.
    adaptive: a width for every token instead of ``bits``, which is the widest.
    allocation: widths by channel, at most ``bits``, which is 8; a token's gain is its only scale.
    shares: the same, where a calibration says how many bits each head has.
    codec: name of the codec of its pages, if it is not one of these (`codec.kept`).
    share: of a page's channels, tokens or values, those that its codec keeps in more bits, or exactly.
    rank: of the matrices that its codec keeps beside the codes of a page.
    chosen_by: who says which of a page's tokens its codec keeps in more bits: some of the prompt's "queries", or, for
        values, those that chose for the "keys" of the layer (`codec.salient`).
    """

    bits: int
    per: Literal["channel", "token"]
    group_size: int
    fit: Literal["minmax", "lsq"] = "minmax"
    eta: float = 0.0
    grid: str = ""
    subspace: Subspace | None = None
    adaptive: Adaptive | None = None
    allocation: Allocation | None = None
    shares: Shares | None = None
    codec: str = ""
    share: float = 0.0
    rank: int = 0
    chosen_by: Literal["", "queries", "keys"] = ""

    def __post_init__(self) -> None:
        check_types(self)
        check_integers(self, bits=1, group_size=1, rank=0)
        if not 0 <= self.share <= 1:
            raise KVPassError(f"share={self.share} must be a fraction of channels or values, in [0, 1].")
        if not self.codec and (self.share or self.rank or self.chosen_by):
            raise KVPassError("share, rank and chosen_by need a codec that uses them: set codec.")
        if self.grid:
            self._check_grid()
        elif self.allocation is not None:
            if (self.bits, self.codec) != (8, "allocated"):
                raise KVPassError("Per-channel bit widths need codec='allocated' and bits=8.")
        elif self.shares is not None:
            if (self.bits, self.codec) != (8, "shares"):
                raise KVPassError("Calibrated bit widths need codec='shares' and bits=8.")
        elif self.bits not in UNIFORM and not self.raw:
            raise KVPassError(f"bits={self.bits} must be one of {list(UNIFORM)}.")
        if self.subspace is not None and self.per != "channel":
            raise KVPassError("Subspace compensation is defined for per-channel keys.")
        if not 0 <= self.eta < 0.5:
            raise KVPassError(
                f"eta={self.eta} must be in [0, 0.5): it is the fraction clipped at each end of the range."
            )
        if self.fit == "lsq" and not self.grid and (self.eta or self.bits > 4):
            raise KVPassError(
                "fit='lsq' finds the best range itself, at up to 4 bits: use eta=0 with it, or fit='minmax'."
            )
        if self.raw and (self.subspace or self.fit != "minmax" or self.eta):
            raise KVPassError(f"bits={self.bits} stores unquantized floats: there is nothing to fit.")

    def _check_grid(self) -> None:
        dim, bits = grid_shape(self.grid)
        if self.bits != bits or self.per != "token" or self.group_size % dim:
            raise KVPassError(
                f"Grid {self.grid!r} needs bits={bits}, per='token' and a group_size that is a multiple of {dim}; got "
                f"bits={self.bits}, per={self.per!r}, group_size={self.group_size}."
            )
        if self.eta:
            raise KVPassError("A grid has no range to clip: use eta=0.")

    __hash__, __getstate__ = hash_once, fields_alone

    def __str__(self) -> str:
        codes = f"{self.bits} bit per {self.per} g{self.group_size}"
        if self.adaptive is not None:
            codes = f"{self.adaptive.widths} bits per token, {self.adaptive.outliers:.1%} exact"
        elif self.allocation is not None:
            by = "per channel and token" if self.allocation.ranked else "per channel"
            return f"{self.allocation.bits:g} bits on average, {by}, blocks of {self.allocation.block_size}"
        elif self.shares is not None:
            by = "per channel and token" if self.shares.ranked else "per channel"
            return f"calibrated bit widths, {by}, blocks of {self.shares.block_size}"
        elif self.raw:
            codes = f"{self.bits}-bit floats"
        elif self.grid:
            codes = f"grid {self.grid} g{self.group_size}"
        return f"{codes} by {self.codec}" if self.codec else codes

    def check(self, head_dim: int) -> None:
        """Raise `KVPassError` unless the groups of heads of ``head_dim`` channels are whole."""
        if self.allocation is not None:
            self.allocation.check(head_dim)
        if self.shares is not None and head_dim % self.shares.block_size:
            raise KVPassError(f"block_size={self.shares.block_size} does not divide head_dim={head_dim}.")
        if self.raw:
            return  # no groups
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
    def dim(self) -> int:
        """Values of one code."""
        return grid_shape(self.grid)[0] if self.grid else 1

    def columns(self, head_dim: int) -> int:
        """Codes of one token."""
        return head_dim // self.dim

    @property
    def needs_queries(self) -> bool:
        """Whether codes depend on the prompt's queries."""
        if (self.chooses and self.shares is None) or (self.allocation is not None and self.allocation.weighted):
            return True
        return self.subspace is not None or (self.adaptive is not None and self.adaptive.fits_energy)

    @property
    def calibrated(self) -> bool:
        """Whether codes are of a datatype that a calibration gives (`codec.datatype`)."""
        return self.codec == "datatype"

    @property
    def follows_keys(self) -> bool:
        """Whether codes depend on what the keys of the layer were stored as."""
        widths = self.allocation or self.shares
        return self.chosen_by == "keys" or (widths is not None and widths.follows)

    @property
    def chooses(self) -> bool:
        """Whether some queries, of the prompt or of a calibration, say which tokens of a page get more bits."""
        widths = self.allocation or self.shares
        return self.chosen_by == "queries" or (widths is not None and widths.chooses)
