"""Options of all schemes: which tokens stay exact, and whether keys are stored before or after rotary embedding."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..codec.transform import Transform
from ..errors import KVPassError
from ..fields import check_integer, check_integers, made
from ..layout.retention import Retention
from .base import LayerPlan, SchemeConfig, get
from .geometry import LayerGeometry


@dataclass(frozen=True, kw_only=True)
class StorageConfig(SchemeConfig):
    """Fields every scheme has.

    residual: R of KIVI, in tokens. The residual window of keys holds 0 to R - 1 tokens, as in the paper.
    value_page: how many values leave their window at a time, so that it holds R to R + value_page - 1 tokens. None is
        R, which is fastest. KIVI's paper has 1; here a page must fill whole bytes (4 tokens at 2 bits).
    sinks: number of first tokens kept in full precision (0 in most papers).
    retention: another policy for keys and values (`kvpass.layout.retention`), instead of ``residual`` and ``sinks``.
    rope: "pre" stores keys before rotary embedding, and rotates them when they are read; "post" stores rotated keys.
    skip_layers: how many of the first and of the last layers use ``skipped`` instead, with the same tokens exact.
    skipped: the scheme of those layers: "identity" (unquantized), or one with more bits, such as "kivi-8".
    """

    stores_layers_alone: ClassVar[bool] = True  # whether each layer is stored independently of the others

    residual: int = 32
    value_page: int | None = None
    sinks: int = 0
    retention: Retention | None = None
    rope: Literal["post", "pre"] = "post"
    skip_layers: tuple[int, int] = (0, 0)
    skipped: str = "identity"

    def __post_init__(self) -> None:
        if isinstance(self.retention, dict):
            object.__setattr__(self, "retention", made(Retention, "retention", self.retention))
        super().__post_init__()
        check_integers(self, residual=1, sinks=0)
        if self.value_page is not None:
            check_integers(self, value_page=1)
            if self._policy() is not None:
                raise KVPassError("Here one retention policy holds for keys and values: leave out value_page.")
        if self.retention is not None and self.sinks:
            raise KVPassError("With a retention policy, give sinks in the policy: Sinks(4) + Recent(128).")
        for count in self.skip_layers:
            check_integer("skip_layers", count, 0)
        if any(self.skip_layers):
            self._check_skipped()

    def _check_skipped(self) -> None:
        if not self.stores_layers_alone:
            raise KVPassError(
                f"The layers of {self.name!r} depend on each other, so none can be skipped: leave out skip_layers."
            )
        skipped = get(self.skipped)
        if not isinstance(skipped, StorageConfig) or not skipped.stores_layers_alone or any(skipped.skip_layers):
            raise KVPassError(f"skipped={self.skipped!r} must store each layer independently: use identity or kivi-8.")
        self._of_skipped()

    def _policy(self) -> Retention | None:
        return self.retention

    def _of_skipped(self) -> SchemeConfig:
        """The scheme of skipped layers, with the same tokens exact as here."""
        policy = self._policy()
        sinks = self.sinks if policy is None else 0
        same = dict(residual=self.residual, value_page=self.value_page, sinks=sinks, retention=policy, rope=self.rope)
        return get(self.skipped, **same)

    def plan_of(self, layer: LayerGeometry) -> LayerPlan:
        first, last = self.skip_layers
        inside = first <= layer.index < layer.num_layers - last
        return self.plan(layer) if inside else self._of_skipped().plan(layer)

    def key_retention(self) -> Retention:
        """Which keys stay exact, are packed or are evicted."""
        return self._policy() or Retention(self.residual, self.residual, self.sinks)

    def value_retention(self) -> Retention:
        """Which values stay exact, are packed or are evicted."""
        page = self.value_page or self.residual
        return self._policy() or Retention(self.residual + page, page, self.sinks)

    def key_transform(self, **fields: Any) -> Transform:
        """The `Transform` of keys before quantization; ``fields`` are its fields besides ``rope``."""
        return Transform(pre_rope=self.rope == "pre" and not fields.get("page_rope"), **fields)
