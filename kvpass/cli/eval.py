"""``kvpass eval``: quality against bits."""

import argparse
from collections.abc import Mapping, Sequence

from .. import models
from ..eval import bits_at, plot, quality
from ..eval.quality import Quality
from ..eval.tables import QUALITY, SPEED, Bits, aligned, as_csv, as_json, bits_columns, markdown, pairs
from .shared import (
    FULL,
    SCHEMES,
    TEXTS,
    add_tokens,
    chosen_schemes,
    numbers,
    out_file,
    prompt_tokens,
    read_texts,
    say,
    stage,
)

HELP = "Measure the quality and the size of schemes on a model and texts."
DEFAULT = "higgs,kivi,kivi-sinks,squat,kivi-3,kivi-4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass eval``."""
    parser.add_argument("--schemes", default=DEFAULT, help=f"default {DEFAULT}; {SCHEMES}")
    parser.add_argument("--text", default="prose,code", help=TEXTS)
    add_tokens(parser)
    parser.add_argument(
        "--lengths",
        type=numbers,
        default="8192,32768,131072",
        metavar="N,...",
        help="also report the bits at these cache lengths",
    )
    parser.add_argument(
        "--token-by-token",
        action="store_true",
        help="score every token in its own decode step; by default, schemes that allow it are scored in one forward",
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    parser.add_argument(
        "--json", type=out_file, metavar="FILE", help="write all results, including the divergence of each token"
    )
    parser.add_argument("--csv", type=out_file, metavar="FILE", help="write one row per text and scheme")
    parser.add_argument("--plot", type=out_file, metavar="FILE", help="plot KL against bits: .svg or .png")


def run(args: argparse.Namespace) -> None:
    """``kvpass eval``."""
    chosen, prompt = chosen_schemes(args.schemes), prompt_tokens(args.context, args.score)
    if args.plot:
        plot.check_plot(args.plot)
    model, tokenizer = models.load(args.model, say=say)
    sources = read_texts(tokenizer, args.text, args.context, model.device)
    with stage(f"{', '.join(sources)}: {prompt} prompt tokens, {args.score} scored, {', '.join(chosen)}"):
        results = quality.evaluate(model, sources, prompt, chosen, one_pass=not args.token_by_token)
    bits = {name: bits_at(model, scheme, args.lengths) for name, scheme in chosen.items()}
    show(results, bits, in_markdown=args.markdown)
    if args.json:
        args.json.write_text(as_json(results, bits, model, args.context, args.score), encoding="utf-8")
    if args.csv:
        args.csv.write_text(as_csv(results, bits), encoding="utf-8")
    if args.plot:
        plot.pareto(
            {text: plot.points(rows) for text, rows in results.items()},
            args.plot,
            f"{prompt} prompt tokens, {args.score} scored",
        )


def show(results: Mapping[str, Sequence[Quality]], bits: Bits, *, in_markdown: bool = False) -> None:
    """Print a table for each text, and by how much each scheme beats the next."""
    for source, rows in results.items():
        columns = [*bits_columns(bits), *QUALITY, *(SPEED if any(row.step_seconds for row in rows) else [])]
        print(f"\n{source}\n\n{(markdown if in_markdown else aligned)(rows, columns)}\n")
        if ranking := pairs([row for row in rows if row.scheme != FULL]):
            print("mean KL, paired by token (2 or more standard errors are unlikely to be chance):")
            print("\n".join(f"- {line}" for line in ranking), flush=True)
