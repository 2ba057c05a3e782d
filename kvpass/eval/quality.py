"""What a scheme costs and saves on a model.

The prompt is prefilled, then the text's real continuation is fed, and each step's distribution is compared with that of
the full-precision model over the same tokens. Scoring token by token emulates nothing: quantized values, window and
page flushes are those of `generate`. In one pass (`runtime.simulated`), each query sees every token as it was stored at
that point. That gives the same results up to rounding and takes no longer than a prefill.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .. import api
from ..cache.swap import bits_per_value, nbytes, num_values
from ..errors import KVPassError, NotSimulatedError
from ..models.arguments import filling, keeping
from ..models.probe import fresh_cache
from ..progress import bar
from ..runtime.applied import is_applied
from ..runtime.simulated import Simulator
from ..schemes import SchemeConfig, get
from ..schemes.calibrated import Calibration
from .size import Scheme, footprint

_Row = tuple[list[float], list[bool], list[float]]
FULL = "full precision"
"""The name that results use for None, full precision."""

_COMPILING_STEPS = 4  # left out of the timing: the decode graph is compiled in the first of them
_KL_FLOOR = 1e-12  # nats; smaller values are rounding
_BLOCK, _Z95 = 16, 1.96
_ROWS = 64  # tokens compared at a time: their distributions are [64, V] in double precision


@dataclass(frozen=True)
class Quality:
    """One scheme on one text.

    divergences: KL(full || scheme) at each scored token, in nats.
    agreements: whether the most likely next token matches full precision, at each scored token.
    surprisals: -log p of the token that follows, in nats, at each scored token but the last.
    nbytes: bytes of everything the cache keeps at the end; bits_per_value: the same in bits, per K or V value.
    values: number of K and V values of the tokens the cache has seen at the end.
    step_seconds: wall time of each one-token decode step, in order, including any compilation; empty if the text was
        scored in one pass.
    """

    scheme: str
    divergences: tuple[float, ...]
    agreements: tuple[bool, ...]
    surprisals: tuple[float, ...]
    nbytes: int
    bits_per_value: float
    values: int
    step_seconds: tuple[float, ...]

    @property
    def kl(self) -> float:
        """Mean divergence, in nats."""
        return statistics.fmean(self.divergences)

    @property
    def log_kl(self) -> float:
        """Mean natural logarithm of the divergences."""
        return statistics.fmean(map(math.log, self.divergences))

    @property
    def kl_error(self) -> float:
        """Half the width of a 95 % interval of ``kl``, from blocks of 16 tokens because neighbours correlate."""
        return interval(self.divergences)

    @property
    def top1(self) -> float:
        """Share of the scored tokens whose most likely next token matches full precision."""
        return statistics.fmean(self.agreements)

    @property
    def perplexity(self) -> float:
        """exp of the mean surprisal."""
        return math.exp(statistics.fmean(self.surprisals))

    @property
    def errors(self) -> dict[str, float]:
        """Half the width of a 95 % interval of each mean, by name. For perplexity it is that of its logarithm, so it is
        relative."""
        return {
            "kl": self.kl_error,
            "log_kl": interval([math.log(divergence) for divergence in self.divergences]),
            "top1": interval(self.agreements),
            "perplexity": interval(self.surprisals),
        }

    def beats(self, other: "Quality") -> float:
        """By how many standard errors the mean divergence is below that of ``other``, paired by token. Raises
        `KVPassError` if the two scored different tokens."""
        if len(self.divergences) != len(other.divergences):
            raise KVPassError(
                f"A paired comparison needs the same tokens: {self.scheme} has {len(self.divergences)}, {other.scheme} "
                f"{len(other.divergences)}."
            )
        differences = [theirs - mine for mine, theirs in zip(self.divergences, other.divergences, strict=True)]
        error = interval(differences) / _Z95
        return statistics.fmean(differences) / error if error else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Median time of a decode step in seconds, without the first steps, which compile."""
        return statistics.median(self.step_seconds[_COMPILING_STEPS:])

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second, from the median step."""
        return 1 / self.seconds_per_step


def interval(values: Sequence[float]) -> float:
    """Half the width of a 95 % interval of the mean of ``values``, from means of blocks of neighbours."""
    blocks = [statistics.fmean(values[i : i + _BLOCK]) for i in range(0, len(values) - _BLOCK + 1, _BLOCK)]
    return _Z95 * statistics.stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else math.inf


def _name(scheme: Scheme) -> str:
    return str(scheme.scheme if isinstance(scheme, Calibration) else scheme)


@contextmanager
def packed(model: nn.Module, scheme: Scheme, **options: Any) -> Iterator[nn.Module]:
    """Apply ``scheme`` to ``model`` within the context, and restore the model afterwards. None leaves it in full
    precision."""
    if scheme is None:
        if is_applied(model):
            raise KVPassError("Full precision was requested, but kvpass is applied: call kvpass.remove(model) first.")
        yield model
        return
    api.apply(model, scheme, **options)
    try:
        yield model
    finally:
        api.remove(model)


def _check(model: nn.Module, ids: Tensor, prompt: int) -> None:
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise KVPassError(f"Score one sequence [1, S] at a time, not {tuple(ids.shape)}.")
    scored = ids.shape[1] - prompt
    if prompt < 1 or scored <= _COMPILING_STEPS:
        raise KVPassError(
            f"{prompt} prompt and {scored} scored tokens: use at least 1 prompt token and more than {_COMPILING_STEPS} "
            f"scored ones (the first {_COMPILING_STEPS} steps compile and are not timed)."
        )
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and ids.shape[1] > context:
        raise KVPassError(f"{ids.shape[1]} tokens exceed the model's context of {context}: use fewer.")


@torch.no_grad()
def reference_logits(model: nn.Module, ids: Tensor, prompt: int) -> Tensor:
    """Full-precision logits after each token that follows the prompt: ``[S - prompt, V]``, from one parallel forward.

    ids: ``[1, S]``, the prompt and the text's real continuation.
    """
    _check(model, ids, prompt)
    with packed(model, None):
        scored = ids.shape[1] - prompt
        logits: Tensor = model(input_ids=ids, **keeping(model, scored), use_cache=False).logits
        return logits[0, -scored:]


@torch.no_grad()
def score(
    model: nn.Module,
    ids: Tensor,
    prompt: int,
    reference: Tensor,
    *,
    name: str,
    step_done: Callable[[], object] = lambda: None,
) -> Quality:
    """Score ``model`` in its current state, packed or not, on ``ids`` ``[1, S]`` (see `packed`, `reference_logits`)."""
    _check(model, ids, prompt)
    cache, device = fresh_cache(model), ids.device
    given = filling(model, cache, 1)
    model(input_ids=ids[:, :prompt], **given)
    rows, seconds = [], []
    for position, full in zip(range(prompt, ids.shape[1]), reference, strict=True):
        start = time.perf_counter()
        logits = model(input_ids=ids[:, position : position + 1], **given).logits[0]
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
        rows.append(_compare(full[None], logits, ids[0, position + 1 : position + 2]))
        step_done()
    size = nbytes(cache), bits_per_value(cache), num_values(cache)
    return _quality(name, rows, size, seconds)


def divergences(expected: Tensor, got: Tensor) -> Tensor:
    """KL(expected || got) of each row of log-probabilities ``[N, V]``, in nats: ``[N]``."""
    return (expected.exp() * (expected - got)).sum(-1)


def _compare(full: Tensor, logits: Tensor, following: Tensor) -> _Row:
    """Divergences, agreements and surprisals of logits ``[N, V]``; ``following`` holds the tokens that follow the first
    N - 1 or N of them."""
    expected, got = (x.double().log_softmax(-1) for x in (full, logits))
    divergence = divergences(expected, got).clamp(min=_KL_FLOOR)
    surprisal = -got[: len(following)].gather(1, following[:, None])[:, 0]
    return divergence.tolist(), (full.argmax(-1) == logits.argmax(-1)).tolist(), surprisal.tolist()


def _quality(name: str, rows: Sequence[_Row], size: tuple[int, float, int], seconds: Sequence[float]) -> Quality:
    divergences, agreements, surprisals = (tuple(chain.from_iterable(column)) for column in zip(*rows, strict=True))
    return Quality(name, divergences, agreements, surprisals, *size, tuple(seconds))


@torch.no_grad()
def score_in_one_pass(
    simulator: Simulator,
    ids: Tensor,
    prompt: int,
    reference: Tensor,
    scheme: SchemeConfig | Calibration | None,
    *,
    name: str,
) -> Quality:
    """The same as `score`, from one forward over all of ``ids``. Sizes are those of a cache after a prompt of this
    length. With ``scheme=None``, full precision, ``reference`` itself is scored. Raises `NotSimulatedError` for schemes
    that can only be scored token by token."""
    model = simulator.model
    _check(model, ids, prompt)
    logits = reference if scheme is None else simulator.logits(ids, prompt, scheme)
    following = ids[0, prompt + 1 :]
    rows = [
        _compare(reference[i : i + _ROWS], logits[i : i + _ROWS], following[i : i + _ROWS])
        for i in range(0, len(reference), _ROWS)
    ]
    size = footprint(model, scheme, ids.shape[1])
    return _quality(name, rows, (size.nbytes, size.bits_per_value, size.values), ())


def evaluate(
    model: nn.Module,
    texts: Mapping[str, Tensor],
    prompt: int,
    schemes: Sequence[Scheme] | Mapping[str, Scheme],
    *,
    progress: bool = True,
    one_pass: bool = False,
    measured: Callable[[dict[str, Quality]], None] | None = None,
    **options: Any,
) -> dict[str, list[Quality]]:
    """For each text, one `Quality` per scheme against one full-precision reference; ``model`` is left as it was found.

    texts: name -> ``[1, S]`` tokens; the first ``prompt`` are prefilled and the rest scored.
    schemes: what `kvpass.apply` takes, as a list or by name; None is the model's own cache. Scored token by token, its
        KL shows the rounding error and its speed is the baseline.
    progress: show a bar if there is a terminal.
    one_pass: use `score_in_one_pass` for schemes that support it, and score the others token by token.
    measured: called with each scheme's `Quality` by text, as soon as it is known.
    options: passed to `kvpass.apply`.
    """
    references = {text: reference_logits(model, ids, prompt) for text, ids in texts.items()}
    results: dict[str, list[Quality]] = {text: [] for text in texts}
    if not isinstance(schemes, Mapping):
        schemes = {FULL if scheme is None else _name(scheme): scheme for scheme in schemes}
    scored = {text: (ids, prompt, references[text]) for text, ids in texts.items()}
    simulator = simulator_of(model) if one_pass else None
    for name, scheme in schemes.items():
        rows = None
        if simulator is not None:
            config = scheme if scheme is None or isinstance(scheme, Calibration) else get(scheme)
            rows = _in_one_pass(simulator, scored, config, name, progress)
        if rows is None:
            with packed(model, scheme, **({} if scheme is None else options)):
                rows = [_token_by_token(model, *each, f"{name}, {text}", progress) for text, each in scored.items()]
        found = {text: replace(row, scheme=name) for text, row in zip(texts, rows, strict=True)}
        for text, row in found.items():
            results[text].append(row)
        if measured is not None:
            measured(found)
    return results


def simulator_of(model: nn.Module) -> Simulator | None:
    """A simulator of ``model``, or None if the model can only be scored token by token."""
    try:
        return Simulator(model)
    except NotSimulatedError:
        return None


def _in_one_pass(
    simulator: Simulator,
    scored: Mapping[str, tuple[Tensor, int, Tensor]],
    scheme: SchemeConfig | Calibration | None,
    name: str,
    progress: bool,
) -> list[Quality] | None:
    """One row per text, or None for schemes that cannot be scored in one pass."""
    rows = []
    with bar(name, len(scored), "text", progress) as texts:
        for ids, prompt, reference in scored.values():
            try:
                rows.append(score_in_one_pass(simulator, ids, prompt, reference, scheme, name=name))
            except NotSimulatedError:
                return None
            texts.update()
    return rows


def _token_by_token(
    model: nn.Module, ids: Tensor, prompt: int, reference: Tensor, what: str, progress: bool
) -> Quality:
    with bar(what, len(reference), "token", progress) as tokens:
        return score(model, ids, prompt, reference, name=what, step_done=tokens.update)
