"""Perplexity of a whole text, in windows of a fixed context.

Windows advance by a stride. In each, the tokens that no earlier window has scored are decoded one by one, after a
prompt of all tokens before them. With a stride as long as the context, every token reads what the scheme stored of all
tokens before it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..digest import digest
from ..errors import KVPassError, NotSimulatedError
from ..fields import shown
from ..models.arguments import keeping
from ..progress import bar
from ..runtime.simulated import Simulator
from ..schemes import get
from ..schemes.calibrated import Calibration
from .likelihood import likelihoods
from .quality import packed, simulator_of
from .size import Scheme

_Z95 = 1.96


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of one scheme on a text.

    surprisals: the sum of ``-log p`` over the scored tokens of each window, in nats.
    counts: the number of scored tokens of each window.
    """

    surprisals: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def value(self) -> float:
        """exp of the mean surprisal of all tokens."""
        return math.exp(sum(self.surprisals) / sum(self.counts))

    def ratio(self, other: Perplexity) -> tuple[float, float]:
        """The perplexity divided by that of ``other`` on the same windows, and the half width of its 95 % interval,
        from differences by window; infinite for one window. Raises `KVPassError` if the windows differ."""
        if self.counts != other.counts:
            raise KVPassError("Perplexities are compared over the same windows: give both the same context and stride.")
        pairs = zip(self.surprisals, other.surprisals, self.counts, strict=True)
        differences = [(mine - theirs) / count for mine, theirs, count in pairs]
        ratio, number = self.value / other.value, len(differences)
        error = _Z95 * statistics.stdev(differences) / math.sqrt(number) if number > 1 else math.inf
        return ratio, ratio * error


def windows(tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """The windows of a text: begin, the first token that is scored, and end. Each token but the first is scored once.

    Raises `KVPassError` for a context below 2 or a stride that is not from 1 to the context.
    """
    if context < 2 or not 1 <= stride <= context:
        raise KVPassError(
            f"context={context} and stride={stride}: use a stride from 1 to the context, which is above 1."
        )
    end = min(context, tokens)
    yield 0, 1, end
    while end < tokens:
        scored, end = end, min(end + stride, tokens)
        yield min(end - context, scored - 1), scored, end


@torch.no_grad()
def perplexities(
    model: nn.Module,
    ids: Tensor,
    schemes: Mapping[str, Scheme],
    context: int,
    stride: int | None = None,
    *,
    file: Path | None = None,
    progress: bool = True,
) -> dict[str, Perplexity]:
    """The perplexity of each scheme on ``ids`` ``[1, N]``, by name; ``model`` is left as it was found.

    Schemes that can be scored in one pass are; the others are decoded token by token.

    schemes: what `kvpass.apply` takes, by name; None is full precision.
    context: tokens of a window. stride: tokens scored in each window but the first; None is the context.
    file: a JSON file, written after every window. Windows that it has are not scored again.
    progress: show a bar if there is a terminal.

    Raises `KVPassError` for a context longer than the model's, a text of one token, or a file of another measurement.
    """
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise KVPassError(f"Perplexity is that of one text [1, N] of at least 2 tokens, not of {tuple(ids.shape)}.")
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and context > most:
        raise KVPassError(f"context={context} exceeds the model's context of {most}: use a shorter one.")
    parts = list(windows(ids.shape[1], context, stride or context))
    facts = dict(text=digest({}, {"ids": ids}), context=context, stride=stride or context)
    kept = _Kept.open(file, facts)
    simulator = simulator_of(model)
    for name, scheme in schemes.items():
        config = scheme if scheme is None or isinstance(scheme, Calibration) else get(scheme)
        done = kept.of(name, config)
        with bar(name, len(parts), "window", progress) as shown_bar:
            shown_bar.update(len(done))
            for surprisal in _surprisals(model, simulator, ids, parts[len(done) :], config):
                done.append(surprisal)
                kept.write()
                shown_bar.update()
    counts = tuple(end - scored for _, scored, end in parts)
    return {name: Perplexity(tuple(kept.rows[name]["surprisals"]), counts) for name in schemes}


def _surprisals(
    model: nn.Module, simulator: Simulator | None, ids: Tensor, parts: Sequence[tuple[int, int, int]], scheme: Any
) -> Iterator[float]:
    """The sum of the surprisals of the tokens that each of ``parts`` scores, in nats."""
    try:
        for begin, scored, end in parts:
            logits = _in_one_pass(model, simulator, ids[:, begin : end - 1], scored - begin, scheme)
            yield _sum(logits, ids[0, scored:end])
    except NotSimulatedError:  # at the first part
        with packed(model, scheme):
            for begin, scored, end in parts:
                request = ids[0, begin:scored].tolist(), ids[0, scored:end].tolist()
                yield -likelihoods(model, [request], token_by_token=True)[0].total


def _in_one_pass(model: nn.Module, simulator: Simulator | None, ids: Tensor, scored: int, scheme: Any) -> Tensor:
    """Logits ``[S - scored + 1, V]`` from one forward over ``ids`` ``[1, S]``, from those that predict token ``scored``
    on. Raises `NotSimulatedError` for schemes that can only be decoded."""
    keep = ids.shape[1] - scored + 1
    if scheme is None:
        logits: Tensor = model(input_ids=ids, use_cache=False, **keeping(model, keep)).logits[0, -keep:]
        return logits
    if simulator is None:
        raise NotSimulatedError("This model can only be scored token by token.")
    return simulator.logits(ids, scored - 1, scheme)


def _sum(logits: Tensor, following: Tensor) -> float:
    """The surprisal of ``following`` ``[S]`` under ``logits`` ``[S, V]``, some rows at a time."""
    total = 0.0
    for rows, wanted in zip(logits.split(256), following.split(256), strict=True):
        total -= rows.double().log_softmax(-1).gather(1, wanted[:, None]).sum().item()
    return total


@dataclass
class _Kept:
    """Results so far, by scheme, and the file that they are written to."""

    file: Path | None
    facts: dict[str, Any]
    rows: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, file: Path | None, facts: dict[str, Any]) -> _Kept:
        if file is None or not file.exists():
            return cls(file, facts, {})
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            rows, found = found["schemes"], {name: found[name] for name in facts}
        except (ValueError, KeyError, TypeError) as error:
            raise KVPassError(f"{file} holds no perplexities: pass another file. ({error!r})") from None
        if found != facts:
            raise KVPassError(
                f"{file} was written for {shown(found)}, and this is {shown(facts)}: pass the same text, context and "
                "stride, or another file."
            )
        return cls(file, facts, rows)

    def of(self, name: str, scheme: Any) -> list[float]:
        """The surprisals of ``name`` so far, a list to append to. Raises `KVPassError` if they are another scheme's."""
        described = "" if scheme is None else str(scheme.scheme if isinstance(scheme, Calibration) else scheme)
        row = self.rows.setdefault(name, dict(scheme=described, surprisals=[]))
        if row["scheme"] != described:
            raise KVPassError(f"{self.file} has results of another scheme called {name!r}: pass another file.")
        found: list[float] = row["surprisals"]
        return found

    def write(self) -> None:
        if self.file is not None:
            self.file.write_text(json.dumps({**self.facts, "schemes": self.rows}) + "\n", encoding="utf-8")
