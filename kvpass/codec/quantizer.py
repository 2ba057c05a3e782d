"""`Quantizer`: the settings that say how values are quantized."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from ..errors import KVPassError
from ..fields import check_integers, check_types, fields_alone, hash_once
from .codebook import grid_shape
from .codec import CODECS, Codec

UNIFORM = (1, 2, 3, 4, 8)
"""Bit widths of uniform quantization."""
RAW = (16, 32)
"""Bit widths that mean unquantized floats."""
_MOST_WEIGHT = 1e6


@dataclass(frozen=True)
class Subspace:
    """Query-subspace error compensation (SQuat, arXiv 2503.24358, eq. 6).

    rank: number of principal directions of the prompt's queries to keep.
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
    """Per-token bit widths, chosen from the error that each token may have (QAQ, arXiv 2403.04643; `codec.adaptive`).

    widths: the available bit widths, narrowest first; at most nine. A token of 0 bits is the middle of its range.
    role: "key" or "value": which error bound of the paper applies.
    sigma: allowed standard deviation of the attention weights (keys) or of the attention output (values).
    outliers: fraction of a token's values that stay exact, half of them the smallest and half the largest.
    rows: number of queries whose largest attention weight predicts a token's future attention mass.
    energy: squared norm of the scaled queries. None uses the 90 % quantile over the prompt's queries.
    keep_originals: keep full-precision tokens in host memory, so that a token's bit width can grow again.
    every: whether bit widths are chosen again whenever a "page" is packed, or after every "token".
    """

    widths: tuple[int, ...]
    role: Literal["key", "value"]
    sigma: float
    outliers: float
    rows: int
    energy: float | None = None
    keep_originals: bool = True
    every: Literal["page", "token"] = "page"

    def __post_init__(self) -> None:
        check_types(self)
        first, steps = self.widths[:1], [b - a for a, b in pairwise(self.widths)]
        fits = set(first) <= {0, *UNIFORM} and set(steps) <= set(UNIFORM)
        if not fits or not self.widths or self.widths[-1] not in UNIFORM:
            raise KVPassError(
                f"widths={self.widths} must be one to nine bit widths, the first 0 or one of {list(UNIFORM)}, the last "
                f"one of these. Each must exceed the previous one by one of {list(UNIFORM)}."
            )
        check_integers(self, rows=1)
        if not 0 <= self.outliers <= 1:
            raise KVPassError(f"outliers={self.outliers} must be a fraction of the values, in [0, 1].")
        for name, value in (("sigma", self.sigma), ("query_energy", self.energy)):
            if value is not None and not 0 < value <= _MOST_WEIGHT:
                raise KVPassError(f"{name}={value} must be above 0 and at most {_MOST_WEIGHT:g}.")

    @property
    def fits_energy(self) -> bool:
        """Whether the energy is measured on the prompt's queries."""
        return self.role == "key" and self.energy is None


@dataclass(frozen=True)
class Quantizer:
    """How values are quantized and dequantized.

    bits: bit width: 1, 2, 3, 4 or 8. 16 or 32 store unquantized floats as bytes.
    per: "channel": ``group_size`` tokens of one channel share a scale. "token": ``group_size`` channels of one token
        share a scale.
    fit: "minmax": the range spans the group. "lsq": scale and zero_point minimize the squared error. "hqq": the scale
        spans the group, and the zero_point minimizes the l_p norm of the error, p = 0.7.
    eta: fraction of the range that is cut off at each end after values are assigned (XQuant eq. 9); "minmax" only.
    grid: name of a vector grid (`codec.codebook`); each d consecutive values become the index of a grid point. "" means
        uniform quantization. With a grid, ``bits`` is the width of one index, and groups have a scale but no
        zero_point.
    subspace: compensates the errors of earlier channels in later ones, within the subspace of the queries.
    adaptive: per-token bit widths; ``bits`` is then the widest of them.
    codec: how pages are stored, with its own parameters (`codec.codec`). None stores quantized values as the other
        fields say (`codec.pages`).
    """

    bits: int
    per: Literal["channel", "token"]
    group_size: int
    fit: Literal["minmax", "lsq", "hqq"] = "minmax"
    eta: float = 0.0
    grid: str = ""
    subspace: Subspace | None = None
    adaptive: Adaptive | None = None
    codec: Codec | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_integers(self, bits=1, group_size=1)
        if self.codec is not None and CODECS.get(self.codec.name) is not type(self.codec):
            name = type(self.codec).__name__
            raise KVPassError(f"Codec {name} has no name of its own: define it as class {name}(..., name='...').")
        if self.grid:
            self._check_grid()
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
        if self.fit == "hqq" and (self.grid or self.eta):
            raise KVPassError("fit='hqq' moves the zero points of uniform quantization: use neither a grid nor eta.")
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
        elif self.raw:
            codes = f"{self.bits}-bit floats"
        elif self.grid:
            codes = f"grid {self.grid} g{self.group_size}"
        return self.codec.describe(codes) if self.codec is not None else codes

    def check(self, head_dim: int) -> None:
        """Raise `KVPassError` unless ``head_dim`` channels divide into whole groups."""
        if self.codec is not None:
            self.codec.check_head(head_dim)
        if self.raw:
            return  # no groups
        channels = head_dim if self.codec is None else self.codec.channels(head_dim)
        if self.per == "token" and channels % self.group_size:
            what = f"head_dim={head_dim}" if channels == head_dim else f"the {channels} channels of all heads"
            raise KVPassError(
                f"group_size={self.group_size} does not divide {what}: per-token groups run along channels. Use a "
                f"divisor of {channels}."
            )
        if self.subspace is not None and head_dim % self.subspace.block_size:
            raise KVPassError(f"block_size={self.subspace.block_size} does not divide head_dim={head_dim}.")

    @property
    def raw(self) -> bool:
        """Whether pages hold unquantized floats."""
        return self.bits in RAW

    @cached_property
    def dim(self) -> int:
        """Number of values that one code stands for."""
        return grid_shape(self.grid)[0] if self.grid else 1

    def columns(self, head_dim: int) -> int:
        """Number of codes of one token."""
        return head_dim // self.dim

    @property
    def needs_queries(self) -> bool:
        """Whether quantized values depend on the prompt's queries."""
        if self.codec is not None and self.codec.needs_queries:
            return True
        return self.subspace is not None or (self.adaptive is not None and self.adaptive.fits_energy)

    @property
    def takes_queries(self) -> bool:
        """Whether quantized values depend on the prompt's queries if the call has them."""
        return self.needs_queries or (self.codec is not None and self.codec.takes_queries)

    @property
    def follows_keys(self) -> bool:
        """Whether quantization reuses the token selection of the layer's keys."""
        return self.codec is not None and bool(self.codec.follows_keys)

    @property
    def chooses(self) -> bool:
        """Whether queries, from the prompt or from a calibration, select which tokens of a page get more bits."""
        return self.codec is not None and bool(self.codec.chooses)
