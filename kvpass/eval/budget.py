"""Recommend a scheme for a budget of bits, from measurements on the user's own model and text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..errors import KVPassError
from ..schemes import get
from .quality import Quality, evaluate
from .size import footprint

SHORT_LIST = (
    "higgs-1.5", "higgs", "higgs-3", "higgs-4", "kivi", "kivi-sinks", "kivi-3", "kivi-4", "kivi-8", "squat",
    "quarot-2", "quarot-3", "quarot", "rtn-3", "rtn", "logquant", "kivi-s8", "e8", "turboquant-3", "turboquant-4",
    "kvarn-k2v2", "kvarn", "kitty", "kitty-25", "kvquant", "kvquant-3", "turboquant-2.5", "turboquant-3.5",
    "turboquant-prod", "zipcache", "zipcache-salient", "gear-l", "polarquant-3", "polarquant",
    "waterfill-2", "waterfill", "waterfill-heads", "waterfill-3", "asymkv-eta", "asymkv-lsq", "xquant", "xquant-lsq",
)  # fmt: skip
"""The candidates: schemes that need no calibration. All but XQuant can be scored in one pass."""
_SURE = 2.0  # standard errors
_SHARE = 4  # the first round scores one in this many tokens
_LEAST, _LEAST_PROMPT = 16, 384  # scored tokens; prompt tokens, enough for every scheme to quantize some


@dataclass(frozen=True)
class Recommendation:
    """The schemes measured, best first, and the evidence for the recommendation.

    rows: one `Quality` per scheme, over all texts.
    bits: name -> bits per value at ``at`` tokens, for every candidate.
    refused: name -> why the scheme cannot be used on this model.
    at: cache length in tokens at which ``bits`` are counted.
    dropped: name -> mean KL over the first part of the texts, for schemes eliminated after that part.
    """

    rows: tuple[Quality, ...]
    bits: dict[str, float]
    refused: dict[str, str]
    at: int
    dropped: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> Quality:
        """The scheme with the lowest mean divergence."""
        return self.rows[0]

    def __str__(self) -> str:
        best, others = self.best, self.rows[1:]
        lines = [
            f'kvpass.apply(model, scheme="{best.scheme}")',
            f"{self.bits[best.scheme]:.2f} bits per value at {self.at:,} tokens; mean KL {best.kl:.4f} ± "
            f"{best.kl_error:.4f} nats, top-1 {best.top1:.1%}, perplexity {best.perplexity:.2f}.",
        ]
        if others:
            lead = best.beats(others[0])
            sure = "" if lead >= _SURE else ": too little to tell them apart, score more tokens"
            lines.append(f"It beats {others[0].scheme} by {lead:.1f} standard errors on the same tokens{sure}.")
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
    """Score the schemes that need at most ``bits`` bits per value after a prompt of ``at`` tokens.

    texts, prompt: as in `kvpass.eval.evaluate`; every scored token has the same weight.
    most: how many schemes are measured on all tokens. If more fit the budget, all of them are first scored on a part: a
        quarter of the scored tokens (at least 16) after a quarter of the prompt (at least 384 tokens). The ones with
        the lowest divergence go on.

    Raises `KVPassError` if no scheme fits, and names the smallest one and its size.
    """
    sizes, refused = {}, {}
    for name in schemes:
        config = get(name)
        try:
            sizes[name] = footprint(model, config, at).bits_per_value
        except KVPassError as error:
            refused[name] = str(error)
    if not sizes:
        raise KVPassError(f"No scheme works on this model: {next(iter(refused.values()), 'none was named')}")
    fitting = sorted((name for name in sizes if sizes[name] <= bits), key=sizes.__getitem__, reverse=True)
    if not fitting:
        smallest = min(sizes, key=sizes.__getitem__)
        raise KVPassError(
            f"No scheme fits into {bits:g} bits per value at {at:,} tokens: the smallest, {smallest}, takes "
            f"{sizes[smallest]:.2f}. Allow that many, or ask at a greater length, where windows and tables weigh less."
        )
    dropped: dict[str, float] = {}
    if len(fitting) > most:
        first = _scored(model, *_parts(texts, prompt), fitting, progress)
        fitting = [row.scheme for row in first[:most]]
        dropped = {row.scheme: row.kl for row in first[most:]}
    return Recommendation(tuple(_scored(model, texts, prompt, fitting, progress)), sizes, refused, at, dropped)


def _scored(
    model: nn.Module, texts: Mapping[str, Tensor], prompt: int, schemes: Sequence[str], progress: bool
) -> list[Quality]:
    """One row per scheme over all texts, lowest divergence first."""
    results = evaluate(model, texts, prompt, schemes, one_pass=True, progress=progress)
    rows = [_pooled(parts) for parts in zip(*results.values(), strict=True)]
    return sorted(rows, key=lambda row: row.kl)


def _parts(texts: Mapping[str, Tensor], prompt: int) -> tuple[dict[str, Tensor], int]:
    """The first tokens of each of ``texts`` ``[1, S]``, and how many of them are the prompt."""

    def part(tokens: int, least: int) -> int:
        return max(min(tokens, least), tokens // _SHARE)

    short = part(prompt, _LEAST_PROMPT)
    return {name: ids[:, : short + part(ids.shape[1] - prompt, _LEAST)] for name, ids in texts.items()}, short


def _pooled(parts: Sequence[Quality]) -> Quality:
    """One scheme's rows over several texts, pooled into one row; sizes are those of the first text."""
    names = ("divergences", "agreements", "surprisals", "step_seconds")
    pooled: dict[str, Any] = {name: tuple(x for part in parts for x in getattr(part, name)) for name in names}
    return replace(parts[0], **pooled)
