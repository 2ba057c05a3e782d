"""``kvpass diagnose``: figures by layer."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from .. import models
from ..eval import plot, texts
from ..eval.diagnostics import diagnose
from ..runtime.simulated import Simulator
from .shared import TEXT, add_tokens, out_file, prompt_tokens, say, scheme, stage

HELP = "Show by layer what a scheme does to attention, and what other papers' schemes could gain."
_PICTURES = {
    "attention": ("attention", "output"),
    "coverage": ("coverage",),
    "queries": ("deviation",),
    "codes": ("same_keys", "chance_keys", "same_values", "chance_values"),
    "probes": ("explained_keys", "explained_values"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass diagnose``."""
    parser.add_argument("--scheme", default="kivi", help="a scheme that can be scored in one pass; default kivi")
    parser.add_argument("--text", default="prose", help=TEXT)
    add_tokens(parser)
    parser.add_argument("--json", type=out_file, metavar="FILE", help="write all figures")
    parser.add_argument(
        "--svg", type=Path, metavar="FOLDER", help=f"draw {', '.join(_PICTURES)}.svg into an existing folder"
    )


def run(args: argparse.Namespace) -> None:
    """``kvpass diagnose``."""
    prompt, chosen = prompt_tokens(args.context, args.score), scheme(args.scheme)
    assert chosen is not None  # only `chosen_schemes` adds full precision
    if args.svg:
        plot.check_plot(args.svg / "codes.svg")
    model, tokenizer = models.load(args.model, say=say)
    ids = texts.tokens(tokenizer, args.text, args.context).to(model.device)
    with stage(f"{args.text}: {prompt} prompt tokens, {args.score} after it, {args.scheme}"):
        found = [asdict(layer) for layer in diagnose(Simulator(model), ids, prompt, chosen)]
    names = [name for picture in _PICTURES.values() for name in picture]
    print("layer".ljust(6) + "".join(f"{name:>18}" for name in names))
    for index, layer in enumerate(found):
        cells = ("-" if layer[name] is None else f"{layer[name]:.4f}" for name in names)
        print(f"{index:<6}" + "".join(f"{cell:>18}" for cell in cells))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.svg:
        for picture, series in _PICTURES.items():
            by_layer = {name: [layer[name] for layer in found] for name in series}
            plot.lines(by_layer, args.svg / f"{picture}.svg", f"{args.scheme}, {args.text}", picture)
