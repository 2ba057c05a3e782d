"""Compare schemes on a text of your own: a table, and a plot of quality against size.

python examples/evaluate_schemes.py my.txt --schemes kivi,higgs,waterfill --plot quality.svg

Quality is the divergence of the next-token distributions from those of the model in full precision, over the same
tokens. `python -m kvpass eval` does the same with more options.
"""

import argparse
from pathlib import Path

from kvpass import models
from kvpass.eval import bits_at, evaluate, plot, texts


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default="prose", help="a UTF-8 file, prose or code; default %(default)s")
    parser.add_argument("--model", help="hub id or folder; default SmolLM2-135M-Instruct")
    parser.add_argument("--schemes", default="kivi,kivi-4,higgs,waterfill", help="comma-separated; default %(default)s")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the text that are read")
    parser.add_argument("--score", type=int, default=512, help="the last of them, which are scored")
    parser.add_argument("--plot", type=Path, default=Path("quality.svg"), help=".svg or .png; default %(default)s")
    parser.add_argument("--token-by-token", action="store_true", help="decode each scored token by itself: slower")
    args = parser.parse_args(argv)
    plot.check_plot(args.plot)  # before anything is measured
    prompt, length = args.context - args.score, 32768

    model, tokenizer = models.load(args.model)
    ids = texts.tokens(tokenizer, args.text, args.context).to(model.device)
    schemes, one_pass = args.schemes.split(","), not args.token_by_token
    rows = evaluate(model, {args.text: ids}, prompt, schemes, one_pass=one_pass)[args.text]

    print(f"{'scheme':12} {'mean KL':>17}  same top token  {'bits/value':>10}  at {length:,}")
    for row in sorted(rows, key=lambda row: row.kl):
        bits = bits_at(model, row.scheme, [length])[length]  # None if it depends on the text
        at = "-" if bits is None else f"{bits:.2f}"
        quality = f"{row.kl:.4f} ± {row.kl_error:.4f}"  # nats, and half of a 95 % interval
        print(f"{row.scheme:12} {quality:>17}  {row.top1:14.1%}  {row.bits_per_value:10.2f}  {at:>9}")
    best, second = sorted(rows, key=lambda row: row.kl)[:2]
    print(f"{best.scheme} beats {second.scheme} by {best.beats(second):.1f} standard errors, on the same tokens")

    plot.pareto({args.text: plot.points(rows)}, args.plot, f"{prompt} prompt tokens, {args.score} scored")
    print(f"plot: {args.plot}")


if __name__ == "__main__":
    main()
