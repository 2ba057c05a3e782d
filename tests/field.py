"""Examine one architecture under kvpass: which uses run as on the untouched model, which layers are fused, which stay
in full precision or are refused and why, and what is wrong.

``python tests/field.py NAME ...`` prints the findings for some architectures.
"""

import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

import kvpass
from kvpass import KVPassError
from kvpass.cache.layer import PackedLayer
from kvpass.cache.swap import cache_layers
from kvpass.models.arguments import CACHE, handing
from kvpass.schemes import IdentityConfig, KIVIConfig

from common import without_inductor
from inputs import Prompt, call, random_tokens, text, with_images, with_types
from shrink import Architecture, find

STEPS, SECONDS = 8, 300
EXACT, ROUNDED = 1e-5, 1e-4  # differences of logits / their standard deviation: eagerly, and in a graph
LOSSLESS, EIGHT_BITS = IdentityConfig(residual=16), KIVIConfig(bits=8, group_size=8, residual=16)
SMALL = 0.1  # mean difference of logits under 8 bits / their standard deviation


@dataclass
class Finding:
    """The result for one architecture, as stored in ``docs/field.json``.

    uses: uses that ran as on the untouched model.
    refused: use -> kvpass's error; "apply" if it refuses the model.
    wrong: use -> what differs, or an error that is not kvpass's.
    untouched: use -> the error that transformers itself raises.
    layers, packed: number of layers of the cache, and of packed ones.
    fused: packed layers whose attention is fused in a captured step; None if no step was captured.
    kept: why layers stay in full precision.
    unfused: why attention dequantizes first.
    eight_bits: mean difference of logits under 8 bits, divided by their standard deviation.
    """

    name: str
    group: str
    uses: list[str] = field(default_factory=list)
    layers: int = 0
    packed: int = 0
    fused: int | None = None
    images: bool = False
    kept: list[str] = field(default_factory=list)
    unfused: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    untouched: dict[str, str] = field(default_factory=dict)
    eight_bits: float | None = None
    seconds: float = 0.0


@dataclass
class Ran:
    """logits: ``[B, V]`` of the last token of each call; the first element has those of all tokens of an unpadded
    prompt."""

    logits: list[Tensor]
    tokens: Tensor | None
    cache: Cache | None


@torch.no_grad()
def steps(model: PreTrainedModel, prompt: Prompt) -> Ran:
    """Run the prompt in one call, then given tokens one by one. The model creates the cache."""
    cached = {} if model.config.is_encoder_decoder else dict(use_cache=True)  # off by default in some models
    out = call(model, prompt, **cached)
    cache, mask = getattr(out, CACHE, None), prompt.mask
    logits = [out.logits[:, -1] if prompt.padding else out.logits]
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    for step in range(STEPS if cache is not None else 0):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        hides = dict(attention_mask=mask) if prompt.padding else {}
        token = {name: random_tokens(1, seed=step + 2)}
        logits.append(model(**token, **prompt.every, **hides, **handing(model, cache), **cached).logits[:, -1])
    return Ran(logits, None, cache)


@torch.no_grad()
def generate(model: PreTrainedModel, prompt: Prompt) -> Ran:
    """Generate greedily. Without padding the mask consists of ones, as a tokenizer returns it."""
    given = {"decoder_input_ids": prompt.ids} if model.config.is_encoder_decoder else {"input_ids": prompt.ids}
    mask = {} if model.config.is_encoder_decoder else dict(attention_mask=prompt.mask)
    out = model.generate(
        **given, **mask, **prompt.every, **prompt.first, max_new_tokens=STEPS, do_sample=False, num_beams=1,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return Ran(list(out.logits), out.sequences, getattr(out, CACHE, None))


Use = Callable[[PreTrainedModel], Ran]


def uses_of(model: PreTrainedModel, architecture: Architecture) -> dict[str, tuple[Use, Prompt]]:
    """The uses to try, by name."""
    plain = text(model, architecture)
    prompts = {"": plain, " with token types": with_types(model, plain), " with images": with_images(model)}
    return {
        f"{how.__name__}{padded}{what}": ((lambda model, how=how, prompt=given: how(model, prompt)), given)
        for what, prompt in prompts.items()
        if prompt is not None
        for padded in ("", " padded")
        for how in (steps, generate)
        for given in [prompt.padded() if padded else prompt]
    }


def differences(got: Ran, expected: Ran, padding: int, tolerance: float) -> str:
    """A description of the differences; empty if there are none."""
    if got.tokens is not None and not torch.equal(got.tokens, expected.tokens):
        first = (got.tokens != expected.tokens).any(0).nonzero()[0].item()
        return f"another token at position {first}; logits differ by {_far(got, expected):.2g} standard deviations"
    if (far := _far(got, expected)) > tolerance or far != far:
        return f"logits differ by {far:.2g} standard deviations"
    return _other_contents(got.cache, expected.cache, padding)


def _far(got: Ran, expected: Ran) -> float:
    """The largest difference of logits, divided by their standard deviation."""
    shapes = [tuple(x.shape) for x in got.logits], [tuple(x.shape) for x in expected.logits]
    if shapes[0] != shapes[1]:
        return float("inf")
    return max(_apart(x, y).max().item() for x, y in zip(got.logits, expected.logits, strict=True))


def _apart(got: Tensor, expected: Tensor) -> Tensor:
    """Differences of logits, divided by their standard deviation. A model may exclude tokens with -inf or similar, if
    it excludes the same ones in both."""
    least = torch.finfo(expected.dtype).min / 2
    possible = expected > least
    if not torch.equal(got > least, possible):
        return torch.tensor(float("inf"))
    return (got - expected)[possible].abs() / expected[possible].std()


def _other_contents(got: Any, expected: Any, padding: int) -> str:
    """The differences between the contents of two caches. Padding is ignored: its values depend on how attention is
    written."""
    if not isinstance(expected, Cache):
        return ""
    layers, others = _used(got), _used(expected)
    if len(layers) != len(others):
        return f"{len(layers)} layers of the cache are used, {len(others)} of the untouched one"
    for index, (mine, theirs) in enumerate(zip(layers, others, strict=True)):
        if not hasattr(theirs, "get_seq_length"):  # a state, not tokens
            continue
        counts = [layer.get_seq_length() for layer in (mine, theirs)]
        if counts[0] != counts[1]:
            return f"layer {index} of the cache holds {counts[0]} tokens, the untouched one {counts[1]}"
        if not isinstance(mine, PackedLayer):
            continue
        for what in ("keys", "values"):
            x, y = getattr(mine, what) + 0, getattr(theirs, what)
            start = 0 if mine.is_cross else padding
            for row, first in ((0, start), (slice(1, None), 0)):
                far = (x[row, ..., first:, :] - y[row, ..., first:, :]).abs().max() / y.std()
                if not far <= ROUNDED:
                    return f"{what} of layer {index} differ by {far.item():.2g} standard deviations"
    return ""


def _used(cache: Cache) -> list[Any]:
    """The layers that hold tokens or a state. A decoder alone may return an empty cache for an encoder's layers."""
    return [layer for layer in cache_layers(cache) if not hasattr(layer, "get_seq_length") or layer.get_seq_length()]


def examine(architecture: Architecture, steps_by: str = "pass", seconds: int = SECONDS) -> Finding:
    """Build an architecture, run each use untouched and packed, and compare. Errors are recorded, not raised.

    steps_by: "inductor" compiles decode steps, as users do; "pass" runs their graphs as the pass leaves them, which is
        faster and fuses the same; "model" captures none.
    """
    finding, start = Finding(str(architecture), architecture.group), time.perf_counter()
    torch._dynamo.reset()
    try:
        with limited(seconds):
            _examine(architecture, finding, steps_by)
    except TooLongError:
        finding.wrong["time"] = f"it took more than {seconds} seconds"
    finding.seconds = round(time.perf_counter() - start, 1)
    return finding


def _examine(architecture: Architecture, finding: Finding, steps_by: str) -> None:
    try:
        model = architecture.model()
        uses = uses_of(model, architecture)
    except Exception as error:
        finding.untouched["build"] = _said(error)
        return
    finding.images = any(name.endswith("images") for name in uses)
    expected: dict[str, Ran] = {}
    for name, (use, _) in uses.items():
        try:
            expected[name] = use(model)
        except Exception as error:
            finding.untouched[name] = _said(error)
    if not expected:
        return
    if not _applied(model, finding, LOSSLESS, lowering="eager"):
        return
    for name in expected:
        _compare(model, finding, name, *uses[name], expected[name], EXACT)
    report = kvpass.explain(model)
    finding.layers, finding.packed = len(report.layers), report.packed
    finding.kept = list(dict.fromkeys(layer.reason for layer in report.layers if not layer.packed))
    kvpass.remove(model)
    _given_back(model, finding, uses, expected)
    _in_eight_bits(model, finding, uses, expected)
    if steps_by != "model":
        of_images = any(layer.plan.startswith("cross-attention") for layer in report.layers)
        _captured(model, finding, uses, expected, of_images, compiled=steps_by == "inductor")


def _applied(model: PreTrainedModel, finding: Finding, scheme: Any, **options: Any) -> bool:
    try:
        kvpass.apply(model, scheme, **options)
    except KVPassError as error:
        finding.refused["apply"] = str(error)
    except Exception as error:
        finding.wrong["apply"] = _said(error)
    else:
        return True
    return False


def _compare(
    model: PreTrainedModel, finding: Finding, name: str, use: Use, prompt: Prompt, expected: Ran, tolerance: float,
    label: str = "",
) -> None:  # fmt: skip
    """Record in ``finding`` how a use of the packed model compares."""
    try:
        other = differences(use(model), expected, prompt.padding, tolerance)
    except KVPassError as error:
        finding.refused[label + name] = str(error)
    except Exception as error:
        finding.wrong[label + name] = _said(error)
    else:
        if other:
            finding.wrong[label + name] = other
        else:
            finding.uses.append(label + name)


def _given_back(
    model: PreTrainedModel, finding: Finding, uses: dict[str, tuple[Use, Prompt]], expected: dict[str, Ran]
) -> None:
    """Check that `remove` restores the model: the same bits."""
    name = next(iter(expected))
    again = uses[name][0](model)
    if "forward" in vars(model) or not all(map(torch.equal, again.logits, expected[name].logits)):
        finding.wrong["remove"] = "the model is another than before"


def _in_eight_bits(
    model: PreTrainedModel, finding: Finding, uses: dict[str, tuple[Use, Prompt]], expected: dict[str, Ran]
) -> None:
    """Check that 8-bit logits of given tokens differ slightly, which shows that quantized values were read, and not
    more."""
    name = next((name for name in expected if name.startswith("steps") and name in finding.uses), None)
    if name is None or not _applied(model, finding, EIGHT_BITS, lowering="eager"):
        if name is not None and "apply" in finding.refused:  # windows are too short to pay
            finding.refused["8 bits"] = finding.refused.pop("apply")
        return
    try:
        got = uses[name][0](model).logits[1:]
    except KVPassError as error:
        finding.refused["8 bits"] = str(error)
    except Exception as error:
        finding.wrong["8 bits"] = _said(error)
    else:
        pairs = list(zip(got, expected[name].logits[1:], strict=True))
        if pairs:
            far = torch.stack([_apart(x, y).mean() for x, y in pairs]).mean().item()
            finding.eight_bits = float(f"{far:.2g}")
            if not 0 < far < SMALL:
                finding.wrong["8 bits"] = f"logits differ by {far:.2g} standard deviations in the mean"
    kvpass.remove(model)


def _captured(
    model: PreTrainedModel, finding: Finding, uses: dict[str, tuple[Use, Prompt]], expected: dict[str, Ran],
    of_images: bool, compiled: bool,
) -> None:  # fmt: skip
    """Record what is fused, and whether a captured step computes the same. Only one use is tried, because each has its
    own graphs: `generate` if it works and has a cache, with images if layers store nothing else."""
    around = contextlib.nullcontext() if compiled else without_inductor()
    cached = [name for name in expected if name in finding.uses and expected[name].cache is not None]
    best = "generate with images" if of_images else "generate"
    name = next(iter(sorted(cached, key=lambda name: (name != best, not name.startswith("generate")))), None)
    if name is None or not _applied(model, finding, LOSSLESS, lowering="auto" if compiled else "reference"):
        return
    with around:
        _compare(model, finding, name, *uses[name], expected[name], ROUNDED, "captured ")
    report = kvpass.explain(model)
    if any(graph.compiled for graph in report.graphs):
        finding.fused = report.fused
    reasons = [report.why_not_fused(layer) for layer in report.layers if layer.packed]
    finding.unfused = [reason for reason in dict.fromkeys(reasons) if reason]
    kvpass.remove(model)


class TooLongError(BaseException):
    """Not an `Exception`, so that no handler mistakes it for a result."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A context that raises `TooLongError` after some seconds, in the main thread of platforms with alarm signals."""

    def stop(*_: Any) -> None:
        raise TooLongError

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _said(error: Exception) -> str:
    """An error in one line, with the place where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]} ({where.filename.rpartition('/')[2]}, {where.name})"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(asdict(examine(find(name))), indent=1), flush=True)
