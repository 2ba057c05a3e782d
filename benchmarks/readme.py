"""Write the tables of README.md and docs/schemes.md, and docs/pareto.svg: python benchmarks/readme.py [SCHEME ... |
--all]

Scores the named schemes on SmolLM2-135M-Instruct as `kvpass eval --context 1280 --score 256` does, merges the results
into docs/results.json, and generates both tables and the picture from it. Schemes that cannot be scored in one pass are
decoded token by token, which takes minutes each. Decode times are read from benchmarks/results/steps-cpu.json; --steps
merges files that `benchmarks/decode_e2e.py --lengths 512,4096 --threads 2 --scheme SCHEME --json FILE` wrote.
"""

import argparse
import json
import re
from pathlib import Path

from waterfill import calibrated

from kvpass import models
from kvpass.eval import bits_at, plot, quality, texts
from kvpass.eval.tables import record

CONTEXT, SCORE, LONG = 1280, 256, 32768
STEP_AT = 4096  # tokens in the cache at the decode step that the README shows
ROOT = Path(__file__).parents[1]
RESULTS, STEPS = ROOT / "docs" / "results.json", ROOT / "benchmarks" / "results" / "steps-cpu.json"
README, PAGE, PICTURE = ROOT / "README.md", ROOT / "docs" / "schemes.md", ROOT / "docs" / "pareto.svg"
IN_README = "kivi", "kivi-4", "higgs", "waterfill", "waterfill-3"
BEGIN, END = "<!-- begin: benchmarks/readme.py -->\n", "<!-- end -->"
SCHEMES = {
    "kivi": "K per channel, V per token, groups of 32, 2 bits",
    "kivi-3": "the same, 3 bits",
    "kivi-4": "the same, 4 bits",
    "kivi-lsq": "2 bits, scales of least squared error",
    "kivi-sinks": "2 bits, and 4 exact first tokens",
    "kivi-pre": "2 bits, keys before RoPE",
    "squat": "2 bits, error kept out of the query subspace",
    "squat-pre": "the same, keys before RoPE",
    "higgs": "rotated heads on a 16-point plane grid, per token",
    "higgs-3": "the same, 64 points",
    "higgs-4": "the same, 256 points",
    "higgs-sinks": "16 points, 4 exact first tokens, and keys centred",
    "quarot-2": "rotated heads, round to nearest, per token, 2 bits",
    "quarot": "the same, 4 bits",
    "rtn-2": "round to nearest, per token, 2 bits",
    "rtn": "the same, 4 bits",
    "logquant": "2 bits, 64 to 95 exact tokens, log-sparse",
    "logquant-twin": "2 bits, 1 sink and the 64 to 95 most recent exact",
    "asymkv": "2-bit K, 1-bit V",
    "asymkv-lsq": "the same, scales of least squared error",
    "waterfill-2": "ours: bits per channel and token in a basis fitted to the prompt, 96 recent tokens, 4 sinks",
    "waterfill": "the same, with a third of a bit more",
    "waterfill-3": "the same, with a bit more",
    "kivi-s8": "`kivi`, scales and zero points in 8 bits",
    "kitty": "2 bits, an eighth of a page's key channels 4, 32 sinks",
    "kitty-25": "the same, a quarter",
    "kvquant": "2 bits before RoPE, fitted datatype, 1 % exact",
    "kvquant-calibrated": "the same, datatypes and key ranges calibrated on 16,384 tokens",
    "kvarn": "rotated, pages balanced, 4-bit K, 2-bit V",
    "kvarn-k2v2": "the same, 2 bits",
    "turboquant": "rotated, Lloyd-Max codes per token, 2 bits",
    "turboquant-prod": "the same, keys with a 1-bit sketch",
    "turboquant-2.5": "a quarter of a page's channels 3 bits, the others 2, either rotated by itself",
    "turboquant-3.5": "the same, 4 and 3 bits",
    "e8": "rotated, points of the E8 lattice per token, 2 bits",
    "d4": "the same, of the D4 lattice",
    "zipcache": "values divided by channel factors, 2 bits",
    "zipcache-salient": "half of a page's tokens 4 bits, by attention, the others 2",
    "polarquant": "keys as radii and angles of pairs, 4 bits each, values 4 bits",
    "polarquant-3": "the same, 3 bits",
    "gear": "2 bits, 2 % exact and a low-rank error term",
    "minicache": "4 bits, codes of pairs of upper layers merged",
    "xquant": "2/1-bit K and V, shared V codes",
    "xquant-lsq": "the same, scales of least squared error",
}


def measure(chosen: list[str], known: dict) -> dict:
    """``known`` updated with the rows of ``chosen``: text -> scheme -> measurements."""
    model, tokenizer = models.load(say=print)
    sources = {source: texts.tokens(tokenizer, source, CONTEXT) for source in texts.available()}
    schemes = calibrated(model, tokenizer, {name: name for name in chosen})
    results = quality.evaluate(model, sources, CONTEXT - SCORE, schemes, one_pass=True)
    bits = {name: bits_at(model, scheme, [LONG]) for name, scheme in schemes.items()}
    return {
        text: {**known.get(text, {}), **{row.scheme: record(row, bits) for row in rows}}
        for text, rows in results.items()
    }


def merged(steps: dict, files: list[Path]) -> dict:
    """``steps`` updated with ``files``: scheme -> tokens in the cache -> step time relative to the default cache."""
    for file in files:
        written = json.loads(file.read_text(encoding="utf-8"))
        scheme = written["arguments"]["scheme"]
        steps[scheme] = {tokens: took[scheme] / took["default"] for tokens, took in written["seconds"].items()}
    return steps


def table(results: dict) -> str:
    """The table of every scheme in Markdown."""
    heads = [
        f"{text}: {what}" if i == 0 else what for text in results for i, what in enumerate(("KL", "log KL", "top-1"))
    ]
    rows = [["scheme", "what", "bits/value", f"at {LONG // 1024}k", *heads]]
    first = next(iter(results.values()))
    for name, what in SCHEMES.items():
        if name in first:
            measured = [cell for text in results.values() for cell in _cells(text[name])]
            rows.append([f"`{name}`", what, f"{first[name]['bits_per_value']:.2f}", _long(first[name]), *measured])
    return _markdown(rows, words=2)


def short_table(results: dict, steps: dict) -> str:
    """The README's table in Markdown: full precision and `IN_README`."""
    heads = [f"KL, {text}" for text in results]
    rows = [["scheme", f"bits/value at {LONG // 1024}k", *heads, f"decode step at {STEP_AT // 1024}k"]]
    rows.append(["full precision", "32 (float32)", *["0"] * len(results), "baseline"])
    first = next(iter(results.values()))
    for name in IN_README:
        divergences = [_cells(text[name])[0] for text in results.values()]
        rows.append([f"`{name}`", _long(first[name]), *divergences, _step(steps.get(name, {}))])
    return _markdown(rows, words=1)


def _markdown(rows: list[list[str]], words: int) -> str:
    """``rows`` with a line under the first; the first ``words`` columns are aligned left, the others right."""
    head, *body = rows
    lines = [head, ["---"] * words + ["--:"] * (len(head) - words), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _long(row: dict) -> str:
    return f"{row[f'bits_per_value_at_{LONG}']:.2f}"


def _step(ratios: dict) -> str:
    if (ratio := ratios.get(str(STEP_AT))) is None:
        return "not measured"
    return f"{abs(1 - ratio):.0%} {'shorter' if ratio < 1 else 'longer'}".replace("%", " %")


def _cells(row: dict) -> list[str]:
    return [f"{row['kl']:.4f} ± {row['kl_error']:.4f}", f"{row['log_kl']:.2f}", f"{row['top1']:.1%}"]


def draw(results: dict, path: Path) -> None:
    """Mean KL against bits per value, as an SVG that is small enough to keep in the repository."""
    points = {
        text: [plot.Point(name, row["bits_per_value"], row["kl"], row["kl_error"]) for name, row in rows.items()]
        for text, rows in results.items()
    }
    plot.pareto(points, path, f"SmolLM2-135M-Instruct, {SCORE} tokens after a prompt of {CONTEXT - SCORE:,}")
    path.write_text(compact(path.read_text(encoding="utf-8")), encoding="utf-8")


def compact(svg: str) -> str:
    """``svg`` without metadata, with coordinates to a tenth of a point and one line for each drawn element."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", svg)
    return re.sub(r" (?=<g id)", "\n", " ".join(svg.split())) + "\n"


def with_block(page: str, block: str) -> str:
    """``page`` with ``block`` between the markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{block}{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", help=f"schemes to measure, of {', '.join(SCHEMES)}; default none")
    parser.add_argument("--all", action="store_true", help="measure every scheme of the table")
    parser.add_argument("--steps", nargs="+", type=Path, default=[], metavar="FILE", help="of decode_e2e.py --json")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    steps = merged(json.loads(STEPS.read_text(encoding="utf-8")) if STEPS.exists() else {}, args.steps)
    if chosen := list(SCHEMES) if args.all else args.schemes:
        results = measure(chosen, results)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.steps:
        STEPS.write_text(json.dumps(steps, indent=1) + "\n", encoding="utf-8")
    draw(results, PICTURE)
    for page, block in ((PAGE, table(results)), (README, short_table(results, steps))):
        page.write_text(with_block(page.read_text(encoding="utf-8"), block), encoding="utf-8")


if __name__ == "__main__":
    main()
