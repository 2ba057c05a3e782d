"""Write the tables of README.md and docs/schemes.md, docs/pareto.svg and docs/lengths.svg: python benchmarks/readme.py
[SCHEME ... | --all | --lengths [SCHEME ...] [--prompts N ...]]

Scores the named schemes on SmolLM2-135M-Instruct as `kvpass eval --context 1280 --score 256` does, merges the results
into docs/results.json, and generates the tables and the pictures from it. Schemes that cannot be scored in one pass are
decoded token by token, which takes minutes each. --lengths also scores them after longer prompts, which takes an hour
and a half for all of its schemes, and merges these results into docs/lengths.json. Decode times are read from
benchmarks/results/steps-cpu.json; --steps merges files that `benchmarks/decode_e2e.py --lengths 512,4096 --threads 2
--scheme SCHEME,... --json FILE` wrote.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from waterfill import calibrated

from kvpass import models
from kvpass.eval import bits_at, plot, quality, texts
from kvpass.eval.tables import record

PROMPT, SCORE, LONG = 1024, 256, 32768
PROMPTS = PROMPT, 3840, 7936  # tokens before the scored ones, where quality is measured by length
STEP_AT = 4096  # tokens in the cache at the decode step that the README shows
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS, STEPS = DOCS / "results.json", ROOT / "benchmarks" / "results" / "steps-cpu.json"
LENGTHS, LENGTHS_PICTURE = DOCS / "lengths.json", DOCS / "lengths.svg"
README, PAGE, PICTURE = ROOT / "README.md", DOCS / "schemes.md", DOCS / "pareto.svg"
IN_README = "kivi", "kivi-4", "higgs", "waterfill", "waterfill-heads", "waterfill-hybrid"
BY_LENGTH = (
    "kivi", "kivi-3", "kivi-4", "kivi-sinks", "squat", "higgs", "higgs-3", "waterfill-2", "waterfill",
    "waterfill-heads", "waterfill-3", "waterfill-static", "waterfill-hybrid",
)  # fmt: skip
_MISSING = "not measured"
BEGIN, BEGIN_LENGTHS, END = (f"<!-- {mark} -->" for mark in ("begin: benchmarks/readme.py", "begin: by length", "end"))
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
    "waterfill-heads": "the same, bits divided among heads by the prompt's attention",
    "waterfill-3": "`waterfill`, with two thirds of a bit more",
    "waterfill-static": "ours, bases and bits by layer, head and channel calibrated once",
    "waterfill-hybrid": "ours, bits by layer and head calibrated once, bases fitted to the prompt",
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
    "zipcache": "values divided by channel factors, 2 bits",
    "zipcache-salient": "half of a page's tokens 4 bits, by attention, the others 2",
    "polarquant": "keys as radii and angles of pairs, 4 bits each, values 4 bits",
    "polarquant-3": "the same, 3 bits",
    "gear": "2 bits, 2 % exact and a low-rank error term",
    "minicache": "4 bits, codes of pairs of upper layers merged",
    "xquant": "2/1-bit K and V, shared V codes",
    "xquant-lsq": "the same, scales of least squared error",
}


def measure(chosen: list[str], prompts: Sequence[int], keep: Callable[[int, dict], None]) -> None:
    """Measure ``chosen`` after each of ``prompts``, in tokens. ``keep`` is called with the prompt and text -> scheme ->
    measurements, as soon as a scheme is measured."""
    model, tokenizer = models.load(say=print)
    schemes = calibrated(model, tokenizer, {name: name for name in chosen})
    bits = {name: bits_at(model, scheme, [LONG]) for name, scheme in schemes.items()}
    for prompt in prompts:
        sources = {source: texts.tokens(tokenizer, source, prompt + SCORE) for source in texts.available()}

        def measured(rows: dict[str, quality.Quality], prompt: int = prompt) -> None:
            keep(prompt, {text: {row.scheme: record(row, bits)} for text, row in rows.items()})

        quality.evaluate(model, sources, prompt, schemes, one_pass=True, measured=measured)


def updated(known: dict, found: dict) -> dict:
    """``known`` with the measurements ``found``, both text -> scheme -> measurements."""
    return {text: known.get(text, {}) | rows for text, rows in found.items()}


def merged(steps: dict, files: list[Path]) -> dict:
    """``steps`` updated with ``files``: scheme -> tokens in the cache -> step time relative to the default cache."""
    for file in files:
        written = json.loads(file.read_text(encoding="utf-8"))
        for scheme in written["arguments"]["scheme"].split(","):
            steps[scheme] = {
                tokens: round(took[scheme] / took["default"], 2) for tokens, took in written["seconds"].items()
            }
    return steps


def table(results: dict) -> str:
    """The table of every scheme in Markdown."""
    heads = [
        f"{text}: {what}" if i == 0 else what for text in results for i, what in enumerate(("KL", "log KL", "top-1"))
    ]
    rows = [["scheme", "what", "bits/value", f"at {LONG // 1024}k", *heads]]
    first = _first(results)
    for name, what in SCHEMES.items():
        if name in first:
            measured = [cell for text in results.values() for cell in _cells(text[name])]
            rows.append([f"`{name}`", what, f"{first[name]['bits_per_value']:.2f}", _long(first[name]), *measured])
    return _markdown(rows, words=2)


def short_table(by_length: dict, steps: dict) -> str:
    """The README's table in Markdown: full precision and `IN_README`. KL is the mean over all texts."""
    heads = [f"KL after {prompt:,}" for prompt in by_length]
    rows = [["scheme", f"bits/value at {LONG // 1024}k", *heads, f"decode step at {STEP_AT // 1024}k"]]
    rows.append(["full precision", "32 (float32)", *["0"] * len(by_length), "baseline"])
    for name in IN_README:
        kl = [
            f"{fmean(text[name]['kl'] for text in results.values()):.4f}" if name in _first(results) else _MISSING
            for results in by_length.values()
        ]
        rows.append([f"`{name}`", _long(_first(_first(by_length))[name]), *kl, _step(steps.get(name, {}))])
    return _markdown(rows, words=1)


def length_table(by_length: dict) -> str:
    """The table of `BY_LENGTH` in Markdown, by text and by the length of the prompt."""
    heads = [f"{text}: KL after {prompt:,}" for text in _first(by_length) for prompt in by_length]
    rows = [["scheme", f"bits/value at {LONG // 1024}k", *heads]]
    for name in BY_LENGTH:
        kl = [
            _cells(results[text][name])[0] if name in results[text] else _MISSING
            for text in _first(by_length)
            for results in by_length.values()
        ]
        rows.append([f"`{name}`", _long(_first(_first(by_length))[name]), *kl])
    return _markdown(rows, words=1)


def _first(mapping: dict) -> dict:
    return next(iter(mapping.values()))


def _markdown(rows: list[list[str]], words: int) -> str:
    """``rows`` with a line under the first; the first ``words`` columns are aligned left, the others right."""
    head, *body = rows
    lines = [head, ["---"] * words + ["--:"] * (len(head) - words), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _long(row: dict) -> str:
    return f"{row[f'bits_per_value_at_{LONG}']:.2f}"


def _step(ratios: dict) -> str:
    if (ratio := ratios.get(str(STEP_AT))) is None:
        return _MISSING
    return f"{abs(1 - ratio):.0%} {'shorter' if ratio < 1 else 'longer'}".replace("%", " %")


def _cells(row: dict) -> list[str]:
    return [f"{row['kl']:.4f} ± {row['kl_error']:.4f}", f"{row['log_kl']:.2f}", f"{row['top1']:.1%}"]


def draw(results: dict, path: Path) -> None:
    """Mean KL against bits per value, as an SVG that is small enough to keep in the repository."""
    points = {
        text: [plot.Point(name, row["bits_per_value"], row["kl"], row["kl_error"]) for name, row in rows.items()]
        for text, rows in results.items()
    }
    plot.pareto(points, path, f"SmolLM2-135M-Instruct, {SCORE} tokens after a prompt of {PROMPT:,}")
    shrink(path)


def draw_lengths(results: dict, path: Path) -> None:
    """Mean KL by length of the prompt."""
    found = {
        text: {
            name: {prompt: rows[text][name]["kl"] for prompt, rows in results.items() if name in rows[text]}
            for name in BY_LENGTH
        }
        for text in _first(results)
    }
    plot.by_length(found, path, f"SmolLM2-135M-Instruct, {SCORE} tokens after prompts of three lengths")
    shrink(path)


def shrink(picture: Path) -> None:
    picture.write_text(compact(picture.read_text(encoding="utf-8")), encoding="utf-8")


def compact(svg: str) -> str:
    """``svg`` without metadata, with coordinates to a tenth of a point and one line for each drawn element."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}", svg)
    return re.sub(r" (?=<g id)", "\n", " ".join(svg.split())) + "\n"


def with_block(page: str, block: str, begin: str = BEGIN) -> str:
    """``page`` with ``block`` between the markers."""
    before, rest = page.split(f"{begin}\n")
    return f"{before}{begin}\n{block}{END}{rest.partition(END)[2]}"


def pages(by_length: dict, steps: dict) -> dict[Path, str]:
    """The pages with their tables: path -> Markdown."""
    schemes = with_block(PAGE.read_text(encoding="utf-8"), table(by_length[PROMPT]))
    return {
        PAGE: with_block(schemes, length_table(by_length), BEGIN_LENGTHS),
        README: with_block(README.read_text(encoding="utf-8"), short_table(by_length, steps)),
    }


def all_lengths() -> dict:
    """The stored results: tokens of the prompt -> text -> scheme -> measurements."""
    return {PROMPT: stored(RESULTS)} | {int(prompt): found for prompt, found in stored(LENGTHS).items()}


def stored(path: Path) -> dict:
    """What ``path`` holds as JSON; nothing if there is no such file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def store(found: dict, path: Path) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", help=f"schemes to measure, of {', '.join(SCHEMES)}; default none")
    parser.add_argument("--all", action="store_true", help="measure every scheme of the table")
    parser.add_argument("--lengths", action="store_true", help=f"measure {', '.join(BY_LENGTH)} by length")
    parser.add_argument("--prompts", type=int, nargs="+", choices=PROMPTS, default=PROMPTS, help="for --lengths")
    parser.add_argument("--steps", nargs="+", type=Path, default=[], metavar="FILE", help="of decode_e2e.py --json")
    args = parser.parse_args()
    results, steps = all_lengths(), merged(stored(STEPS), args.steps)
    everything = SCHEMES if args.all else BY_LENGTH if args.lengths else ()

    def keep(prompt: int, found: dict) -> None:
        results[prompt] = updated(results.get(prompt, {}), found)
        store(results[PROMPT], RESULTS)
        store({length: rows for length, rows in results.items() if length != PROMPT}, LENGTHS)

    if chosen := args.schemes or list(everything):
        measure(chosen, args.prompts if args.lengths else PROMPTS[:1], keep)
    if args.steps:
        store(steps, STEPS)
    draw(results[PROMPT], PICTURE)
    draw_lengths(results, LENGTHS_PICTURE)
    for page, text in pages(results, steps).items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
