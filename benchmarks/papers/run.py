"""One table of a paper in miniature: python benchmarks/papers/run.py {squat,logquant,xquant,qaq,aqua,...} [--model M]

Every row is scored on the same tokens, by its divergence from full precision (`kvpass eval`), and printed beside the
paper's figure. Then every pair of the paper's rows is compared: ordered as in the paper, the other way round (both by
at least two standard errors, paired by token), or not told apart. Results go to benchmarks/results/papers-NAME.json,
row by row, or to papers-NAME-MODEL.json with another model. Rows that are there are not measured again; --page writes
the tables of docs/papers.md from these files.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import torch
from tables import TABLES, Row, Table, resolved

import kvpass
from kvpass import models
from kvpass.errors import NotSimulatedError
from kvpass.eval import bits_at, quality, texts
from kvpass.eval.quality import Quality
from kvpass.runtime.simulated import Simulator
from kvpass.schemes import SchemeConfig, get

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "papers.md"
LONG, SURE = 32768, 2.0
CALIBRATION = "modules", "manual", "readme"  # texts that share nothing with those that are scored
FIELDS = "divergences", "agreements", "surprisals"
SMALL = "SmolLM2-135M-Instruct"
MODELS = SMALL, "package:Qwen2.5-Coder-0.5B-Instruct"  # those of the page
NAMED = 6  # pairs that are not told apart are named if there are no more


def measure(name: str, table: Table, source: str, loaded: tuple, out: Path) -> dict:
    """Score the rows of ``table`` that ``out`` lacks; returns what is then in it. ``loaded`` is that of `load`."""
    model_name, tokenizer, simulator = loaded
    ids = texts.tokens(tokenizer, source, table.prompt + table.scored)
    written = dict(table=name, model=model_name, text=source, prompt=table.prompt, scored=table.scored, rows={})
    if out.exists():
        written = json.loads(out.read_text(encoding="utf-8"))
    model, reference = simulator.model, quality.reference_logits(simulator.model, ids, table.prompt)
    for row in map(resolved, table.rows):
        if measured(row, written["rows"]):
            continue
        scheme = calibrated(model, tokenizer, row.scheme) if row.scheme.needs_calibration else row.scheme
        found = scored(simulator, ids, table.prompt, reference, scheme, row.name)
        long = bits_at(model, scheme, [LONG])[LONG]
        kept = {field: [round(float(x), 6) for x in getattr(found, field)] for field in FIELDS}
        written["rows"][row.name] = dict(
            scheme=str(row.scheme), bits=found.bits_per_value, bits_at_32k=long, kl=found.kl, kl_error=found.kl_error,
            perplexity=found.perplexity, top1=found.top1, **kept,
        )  # fmt: skip
        out.write_text(json.dumps(written) + "\n", encoding="utf-8")
        print(f"{row.name}: KL {found.kl:.4f}, {found.bits_per_value:.2f} bits", file=sys.stderr, flush=True)
    return written


def load(model_name: str | None) -> tuple:
    """The model's name, its tokenizer, and one simulator for all tables: capturing a graph takes a minute or more."""
    model, tokenizer = models.load(model_name, dtype=torch.float32, say=lambda text: print(text, file=sys.stderr))
    return model_name or SMALL, tokenizer, Simulator(model)


def results_of(name: str, model_name: str, folder: Path) -> Path:
    """The file of the results of table ``name``."""
    other = "" if model_name == SMALL else f"-{model_name.rpartition(':')[2].replace('/', '-')}"
    return folder / f"papers-{name}{other}.json"


def scored(simulator: Simulator, ids, prompt: int, reference, scheme, name: str) -> Quality:
    """In one pass if the scheme allows it, otherwise token by token."""
    try:
        return quality.score_in_one_pass(simulator, ids, prompt, reference, scheme, name=name)
    except NotSimulatedError:
        with quality.packed(simulator.model, scheme, lowering="eager") as model:
            return quality.score(model, ids, prompt, reference, name=name)


def calibrated(model, tokenizer, scheme):
    """``scheme`` fitted to 4 sequences of 512 tokens of each text for calibrating."""
    parts = [texts.tokens(tokenizer, source, 2048).view(4, 512) for source in CALIBRATION]
    return kvpass.calibrate(model, torch.cat(parts), scheme, progress=False)


def measured(row: Row, rows: dict) -> bool:
    """Whether ``rows`` has ``row``, for its scheme as it is defined now."""
    return row.name in rows and describes(rows[row.name]["scheme"], row.scheme)


def describes(text: str, scheme: SchemeConfig) -> bool:
    """Whether ``text`` was written for ``scheme``. A field that has been added since must have its default."""
    name, fields = parts(text)
    known = {field.name: field for field in dataclasses.fields(scheme)}
    if name != scheme.name or not fields.keys() <= known.keys():
        return False
    for field, default in ((field, getattr(get(name), field)) for field in known):
        value = getattr(scheme, field)
        if field not in fields:
            same = value == default
        else:
            same = describes(fields[field], value) if isinstance(value, SchemeConfig) else fields[field] == str(value)
        if not same:
            return False
    return True


def parts(text: str) -> tuple[str, dict[str, str]]:
    """The name and the fields, as text, of a scheme that was written as ``str(scheme)``."""
    name, _, inside = text.removesuffix(")").partition("(")
    found, depth = [""], 0
    for character in inside:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return name, {field: value for field, _, value in (one.strip().partition("=") for one in found if one.strip())}


def quality_of(name: str, row: dict) -> Quality:
    """A written row as a `Quality`."""
    divergences, agreements, surprisals = (tuple(row[field]) for field in FIELDS)
    return Quality(name, divergences, agreements, surprisals, 0, row["bits"], 0, ())


def order(table: Table, rows: dict) -> tuple[list[str], list[str], list[str]]:
    """Pairs of the paper's rows that are ordered as there, that are ordered otherwise, and that are not told apart."""
    same, other, open_ = [], [], []
    known = [row for row in table.rows if row.figure is not None and row.name in rows]
    for a, b in combinations(known, 2):
        if a.figure == b.figure:
            continue
        better, worse = (a, b) if (a.figure < b.figure) == table.lower else (b, a)
        lead = quality_of(better.name, rows[better.name]).beats(quality_of(worse.name, rows[worse.name]))
        into = same if lead >= SURE else other if lead <= -SURE else open_
        into.append(f"{better.name} before {worse.name}")
    return same, other, open_


def markdown(table: Table, results: Sequence[dict]) -> str:
    """The table with the paper's figures beside ours, and the verdicts on its order. results: what is in the files of
    its results; of models other than the first, only the KL is shown."""
    others = results[1:]
    more = [f"KL, {short(other)}" for other in others]
    lines = [
        f"**{table.paper}, {table.source}.** Ours: {table.scored} tokens after {table.prompt:,}.\n",
        f"| {' | '.join(['row', f'paper: {table.figure}', 'bits/value at 32k', 'KL', 'perplexity', 'top-1', *more])} |",
        "|---|" + "--:|" * (5 + len(more)),
    ]
    found = [current(table, each["rows"]) for each in results]
    lines += [line(row, table, found) for row in table.rows if row.name in found[0]]
    verdicts = [verdict(table, rows, short(each) if others else "") for each, rows in zip(results, found, strict=True)]
    return "\n".join(lines) + "\n\n" + "\n\n".join(verdicts) + "\n"


def short(result: dict) -> str:
    """The name of the model of ``result``."""
    return result["model"].rpartition(":")[2].removesuffix("-Instruct")


def current(table: Table, rows: dict) -> dict:
    """Those of the written ``rows``, by name, that were measured for the schemes of ``table`` as they are now."""
    return {row.name: rows[row.name] for row in map(resolved, table.rows) if measured(row, rows)}


def line(row: Row, table: Table, found: Sequence[dict]) -> str:
    """The line of ``row``. found: the `current` rows of each model."""
    of, *others = (rows.get(row.name) for rows in found)
    figure = "" if row.figure is None else f"{row.figure:g}"
    by_text = f"{of['bits']:.2f} after {table.prompt + table.scored:,}"  # these bits depend on the text
    long = by_text if of["bits_at_32k"] is None else f"{of['bits_at_32k']:.2f}"
    ours = [kl(of), f"{of['perplexity']:.2f}", f"{of['top1']:.1%}"]
    ours += ["" if other is None else kl(other) for other in others]
    return f"| {' | '.join([row.name, figure, long, *ours])} |"


def kl(of: dict) -> str:
    return f"{of['kl']:.4f} ± {of['kl_error']:.4f}"


def verdict(table: Table, rows: dict, model_name: str) -> str:
    """How the pairs of the paper's ``rows`` are ordered. ``model_name`` is named if it is not empty."""
    same, other, open_ = order(table, rows)
    where = f"{model_name}: of" if model_name else "Of"
    return "\n".join([
        f"{where} {len(same) + len(other) + len(open_)} pairs of the paper's rows, {len(same)} are in its order.\n",
        f"- The other way round: {counted(other)}.",
        f"- Not told apart: {counted(open_, NAMED)}.",
    ])  # fmt: skip


def counted(pairs: Sequence[str], most: int | None = None) -> str:
    """How many ``pairs`` there are, and which, unless there are more than ``most``."""
    if not pairs:
        return "none"
    return f"{len(pairs)}" if most and len(pairs) > most else f"{len(pairs)} ({'; '.join(pairs)})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--model", help="as for kvpass eval; default SmolLM2-135M-Instruct")
    parser.add_argument("--text", default="prose", help="as for kvpass eval")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/papers.md")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.tables if name not in TABLES]:
        parser.error(f"unknown table {unknown[0]}: choose from {', '.join(TABLES)}")
    loaded = load(args.model) if args.tables else ()
    for name in args.tables:
        results = measure(name, TABLES[name], args.text, loaded, results_of(name, loaded[0], args.out))
        print(markdown(TABLES[name], [results]))
    if args.page:
        page = PAGE.read_text(encoding="utf-8")
        for name, table in TABLES.items():
            begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
            files = [results_of(name, model, args.out) for model in MODELS]
            if begin in page and files[0].exists():
                results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
                before, rest = page.split(begin)
                page = f"{before}{begin}{markdown(table, results)}{end}{rest.partition(end)[2]}"
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
