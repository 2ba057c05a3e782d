"""What all schemes with uniform codes have in common: groups, windows, where keys are stored, how scales are found."""

from dataclasses import dataclass
from typing import Literal

from ..codec.spec import CodecSpec, check_integers
from ..errors import KVPassError
from ..retention import Retention
from .base import SchemeConfig


@dataclass(frozen=True, kw_only=True)
class UniformConfig(SchemeConfig):
    """Uniform codes with 16-bit scales: ``bits + 32 / group_size`` bits a value, plus the exact tokens.

    group_size: tokens that share a key scale, and channels that share a value scale.
    residual: R of KIVI, a multiple of ``group_size``. The key window swings between 0 and R - 1 tokens, as in the
        paper. Values leave theirs R at a time too, so it holds R to 2R - 1 tokens where the paper holds R.
    sinks: first tokens kept in full precision (0 in the papers).
    retention: another policy (`kvpass.retention`), for keys and values alike, instead of ``residual`` and ``sinks``.
    rope: "pre" stores keys as they were before rotary embedding, and rotates what is read.
    fit: "minmax" scales span a group; "lsq" scales and zero points minimise its squared error.
    eta: with "minmax", the share of a group's range cut off at both ends when it is decoded (XQuant, eq. 9).
    """

    group_size: int = 32
    residual: int = 32
    sinks: int = 0
    retention: Retention | None = None
    rope: Literal["post", "pre"] = "post"
    fit: Literal["minmax", "lsq"] = "minmax"
    eta: float = 0.0

    def __post_init__(self):
        check_integers(self, group_size=1, residual=1, sinks=0)
        if isinstance(self.retention, dict):
            object.__setattr__(self, "retention", Retention(**self.retention))
        if self.rope not in ("post", "pre"):
            raise KVPassError(f"rope={self.rope!r}: keys are stored 'post' or 'pre' rotary embedding.")
        if self.retention is not None and self.sinks:
            raise KVPassError("sinks are part of the retention policy: Sinks(4) + Recent(128).")

    def _policy(self) -> Retention | None:
        return self.retention

    def key(self, bits: int, per: str = "channel", **fields) -> CodecSpec:
        """Storage of keys, per channel unless said otherwise."""
        return self._codec(bits, per, 0, pre_rope=self.rope == "pre", **fields)

    def value(self, bits: int, **fields) -> CodecSpec:
        """Storage of values, per token."""
        return self._codec(bits, "token", self.residual, **fields)

    def _codec(self, bits: int, per: str, residual: int, **fields) -> CodecSpec:
        storage = dict(page_size=self.residual, residual=residual, sinks=self.sinks)
        if (policy := self._policy()) is not None:
            storage = policy.storage
        if per == "channel" and storage["page_size"] % self.group_size:
            what = f"residual={self.residual}" if policy is None else f"page_size={policy.page_size} of the retention"
            raise KVPassError(
                f"{what} must be a multiple of group_size={self.group_size}: keys are packed in whole groups of tokens."
            )
        fields = {"fit": self.fit, "eta": self.eta, **storage, **fields}
        return CodecSpec(bits, per, self.group_size, **fields)
