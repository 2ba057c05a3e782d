"""Which scheme to take within a budget of bits: measured on the user's own model and text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..errors import KVPassError
from ..schemes import get
from .quality import Quality, evaluate
from .size import footprint

SHORT_LIST = (
    "higgs-1.5", "higgs", "higgs-3", "higgs-4", "kivi", "kivi-sinks", "kivi-3", "kivi-4", "kivi-8", "squat",
    "quarot-2", "quarot-3", "quarot", "rtn-3", "rtn", "logquant", "kivi-s8", "e8", "turboquant-3", "turboquant-4",
    "kvarn-k2v2", "kvarn", "kitty", "kitty-25", "kvquant", "kvquant-3",
)  # fmt: skip
"""What is considered: schemes that need no calibration and are scored in one pass."""
_SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Recommendation:
    """The schemes measured, best first, with what they are recommended by.

    rows: one `Quality` each, over all texts; bits: bits a value at ``at`` tokens, of everything considered; refused:
    why others cannot be used on this model, by name.
    """

    rows: tuple[Quality, ...]
    bits: dict[str, float]
    refused: dict[str, str]
    at: int

    @property
    def best(self) -> Quality:
        """The scheme of the lowest mean divergence."""
        return self.rows[0]

    def __str__(self) -> str:
        best, others = self.best, self.rows[1:]
        lines = [
            f'kvpass.apply(model, scheme="{best.scheme}")',
            f"{self.bits[best.scheme]:.2f} bits a value at {self.at:,} tokens; mean KL {best.kl:.4f} ± "
            f"{best.kl_error:.4f} nats, top-1 {best.top1:.1%}, perplexity {best.perplexity:.2f}.",
        ]
        if others:
            lead = best.beats(others[0])
            sure = "" if lead >= _SURE else ": too little to tell them apart, score more tokens"
            lines.append(f"It leads {others[0].scheme} by {lead:.1f} standard errors on the same tokens{sure}.")
        return "\n".join(lines)


def recommend(
    model: nn.Module,
    texts: Mapping[str, Tensor],
    prompt: int,
    bits: float,
    *,
    at: int = 32768,
    schemes: Sequence[str] = SHORT_LIST,
    most: int = 6,
    progress: bool = True,
) -> Recommendation:
    """Score the schemes that take at most ``bits`` bits a value behind a prompt of ``at`` tokens.

    texts, prompt: as `kvpass.eval.evaluate` takes them; all scored tokens count alike.
    most: how many are measured, those with the most bits: more bits are rarely worse.

    Raises `KVPassError` if none fits, and says what the smallest takes.
    """
    sizes, refused = {}, {}
    for name in schemes:
        config = get(name)
        try:
            sizes[name] = footprint(model, config, at).bits_per_value
        except KVPassError as error:
            refused[name] = str(error)
    if not sizes:
        raise KVPassError(f"No scheme can be used on this model: {next(iter(refused.values()), 'none was named')}")
    fitting = sorted((name for name in sizes if sizes[name] <= bits), key=sizes.__getitem__, reverse=True)[:most]
    if not fitting:
        smallest = min(sizes, key=sizes.__getitem__)
        raise KVPassError(
            f"No scheme fits in {bits:g} bits a value at {at:,} tokens: the smallest, {smallest}, takes "
            f"{sizes[smallest]:.2f}. Allow that, or ask at a greater length, where windows and tables weigh less."
        )
    results = evaluate(model, texts, prompt, fitting, one_pass=True, progress=progress)
    rows = [_pooled(parts) for parts in zip(*results.values(), strict=True)]
    return Recommendation(tuple(sorted(rows, key=lambda row: row.kl)), sizes, refused, at)


def _pooled(parts: Sequence[Quality]) -> Quality:
    """One scheme over several texts as over one; bytes are those of the first."""
    names = ("divergences", "agreements", "surprisals", "step_seconds")
    pooled: dict[str, Any] = {name: tuple(x for part in parts for x in getattr(part, name)) for name in names}
    return replace(parts[0], **pooled)
