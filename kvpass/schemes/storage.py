"""What all schemes share: which tokens stay exact, and on which side of rotary embedding keys are stored."""

from dataclasses import dataclass
from typing import Any, Literal

from ..codec.transform import Transform
from ..errors import KVPassError
from ..fields import check_integers, made
from ..layout.retention import Retention
from .base import SchemeConfig


@dataclass(frozen=True, kw_only=True)
class StorageConfig(SchemeConfig):
    """Fields every scheme has.

    residual: R of KIVI. The key window swings between 0 and R - 1 tokens, as in the paper. Values leave theirs R at a
        time too, so it holds R to 2R - 1 tokens where the paper holds R.
    sinks: first tokens kept in full precision (0 in most papers).
    retention: another policy (`kvpass.layout.retention`), for keys and values alike, in place of ``residual``
        and ``sinks``.
    rope: "pre" stores keys as they were before rotary embedding, and rotates what is read.
    """

    residual: int = 32
    sinks: int = 0
    retention: Retention | None = None
    rope: Literal["post", "pre"] = "post"

    def __post_init__(self) -> None:
        if isinstance(self.retention, dict):
            object.__setattr__(self, "retention", made(Retention, "retention", self.retention))
        super().__post_init__()
        check_integers(self, residual=1, sinks=0)
        if self.retention is not None and self.sinks:
            raise KVPassError("sinks are part of the retention policy: Sinks(4) + Recent(128).")

    def _policy(self) -> Retention | None:
        return self.retention

    def key_retention(self) -> Retention:
        """Which keys are exact, packed and evicted."""
        return self._policy() or Retention(self.residual, self.residual, self.sinks)

    def value_retention(self) -> Retention:
        """The same of values."""
        return self._policy() or Retention(2 * self.residual, self.residual, self.sinks)

    def key_transform(self, **fields: Any) -> Transform:
        """What is done to keys before they are quantized; ``fields`` are those of a `Transform`, besides ``rope``."""
        return Transform(pre_rope=self.rope == "pre", **fields)
