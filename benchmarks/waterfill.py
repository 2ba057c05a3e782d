"""Ablation of `waterfill`, and other schemes: python benchmarks/waterfill.py [--model M] [--text FILE,...] [row ...]

All rows are scored in one pass after the same prompts. Bits are those of a cache of 8,192 tokens in bfloat16,
everything counted; KL and agreement are those of `kvpass eval`.

How the statistics of a prompt age, in quarters of the tokens scored after it:

    python benchmarks/waterfill.py --text prose --then code --prompt 512 --scored 2048 waterfill
"""

import argparse
import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from kvpass import calibrate, models, schemes
from kvpass.calibration.default_texts import reading_for
from kvpass.calibration.water_filling import ONE_IN, Statistics, add_text, find_turns, repeating, share_out
from kvpass.eval import bits_at, quality, texts
from kvpass.layout.retention import Recent, Sinks
from kvpass.models.probe import calibrated_layers, probe
from kvpass.schemes import LayerGeometry
from kvpass.schemes.calibrated import Calibration, describe

LONG = 8192  # tokens of the caches whose bits are reported
CALIBRATED, LENGTH, SKIPPED = 8, 1024, 4096  # sequences per text, their tokens, and the scored tokens before them
RIVALS = "kivi", "kivi-sinks", "kivi-3", "kivi-4", "squat", "higgs-sinks", "higgs-3"


def fields(*each: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """The fields of keys and of values, each for low- and then for high-precision tokens; equal fields for both ranks
    mean no ranks."""
    names = "key_fields", "rich_key_fields", "value_fields", "rich_value_fields"
    given = dict(zip(names, each, strict=True))
    return given | {f"rich_{name}": (0, 0) for name in names[::2] if given[name] == given[f"rich_{name}"]}


ROWS = {
    "waterfill": {},
    "channels not decorrelated": dict(block_size=1),
    "blocks of 4": dict(block_size=4),
    "blocks of 8": dict(block_size=8),
    "blocks of 16": dict(block_size=16),
    "not weighted by queries": dict(weighted=False),
    "after RoPE": dict(rope="post"),
    "mean not subtracted": dict(center=False),
    "without sinks": dict(sinks=0),
    "one bit width for all tokens": fields((14, 4), (14, 4), (14, 4), (14, 4)),
    "per-token bit widths for keys only": fields((10, 4), (18, 4), (14, 4), (14, 4)),
    "half a bit more for high-precision tokens": fields((12, 4), (16, 4), (11, 4), (16, 4)),
    "a bit and a half": fields((8, 4), (20, 4), (7, 4), (20, 4)),
    "pairs of bits only": fields((12, 0), (20, 0), (11, 0), (20, 0)),
    "more single bits": fields((8, 8), (16, 8), (7, 8), (16, 8)),
    "more bits for keys": fields((12, 4), (20, 4), (7, 4), (16, 4)),
    "more bits for values": fields((8, 4), (16, 4), (11, 4), (20, 4)),
    "no recent tokens": dict(recent=0),
    "32 recent tokens": dict(recent=32),
    "160 recent tokens": dict(recent=160),
    "32 recent, half a bit more for high-precision tokens": dict(
        recent=32, **fields((12, 4), (16, 4), (14, 4), (17, 4))
    ),
    "32 recent, one bit width for all tokens": dict(recent=32, **fields((14, 4), (14, 4), (16, 4), (16, 4))),
    "only values are quantized": dict(key_fields=(48, 0), rich_key_fields=(48, 0)),
    "only keys are quantized": dict(value_fields=(48, 0), rich_value_fields=(0, 0)),
    "bits by head": dict(by_head=True),
    "waterfill-heads": dict(scheme="waterfill-heads"),
    "waterfill-2": dict(scheme="waterfill-2"),
    "waterfill-3": dict(scheme="waterfill-3"),
    "static": dict(scheme="waterfill-static"),
    "static, one bit width for all tokens": dict(scheme="waterfill-static", ranked=False),
    "hybrid": dict(scheme="waterfill-hybrid"),
    **{f"static, {bits} bits": dict(scheme="waterfill-static", bits=bits) for bits in (1.6, 1.8, 2.2, 2.82)},
    **{f"hybrid, {bits} bits": dict(scheme="waterfill-hybrid", bits=bits) for bits in (1.73, 2.2, 2.75)},
    "static, on its own words": dict(scheme="waterfill-static"),
    "hybrid, on its own words": dict(scheme="waterfill-hybrid"),
    **{name: dict(scheme=name) for name in RIVALS},
    "kivi, the same tokens exact": dict(scheme="kivi", retention=Sinks(4) + Recent(128, page_size=32)),
    "kivi-3, the same tokens exact": dict(scheme="kivi-3", retention=Sinks(4) + Recent(128, page_size=32)),
}


class Part(NamedTuple):
    """Statistics of one sequence: of the text with this name, the ``index``-th, ``repeated`` or as it is."""

    text: str
    index: int
    repeated: bool
    statistics: dict[int, Statistics]


def statistics_of(model, tokenizer) -> list[Part]:
    """What `kvpass.calibrate` gathers for `waterfill-static` from the texts that come with kvpass, by sequence."""
    config, generator = schemes.get("waterfill-static"), torch.Generator().manual_seed(0)
    layers = {i: own for i, own in calibrated_layers(config, probe(model)).items() if isinstance(own, LayerGeometry)}
    reading = reading_for(config)
    data = [(name, i, ids) for name in reading.sources for i, ids in enumerate(reading.of_text(tokenizer, name))]
    turns, parts = find_turns(model, layers, data[0][2][None, :16]), []
    for number, (name, i, ids) in enumerate(data):
        for repeated in (False, True)[: 1 + (number % ONE_IN == 0)]:
            found = {layer: Statistics(geometry, turns[layer]) for layer, geometry in layers.items()}
            add_text(found, model, repeating(ids[None]) if repeated else ids[None], config, repeated, generator)
            parts.append(Part(name, i, repeated, found))
    return parts


def merged(parts: Sequence[Part]) -> dict[int, Statistics]:
    """The statistics of several sequences together."""
    found = {layer: Statistics(own.layer, own.turn) for layer, own in parts[0].statistics.items()}
    for part in parts:
        for layer, own in part.statistics.items():
            found[layer].merge(own)
    return found


def calibrated(model, tokenizer, rows: Mapping[str, str | dict[str, Any]]) -> dict[str, Any]:
    """The scheme of each row; those that need it are calibrated on the texts that come with kvpass, or on what the
    model writes."""
    found: dict[str, Any] = {name: schemes.get(scheme) for name, scheme in rows.items()}
    statistics = None
    with tempfile.TemporaryDirectory() as work:
        for name, config in found.items():
            if name.endswith("on its own words"):
                found[name] = calibrate(model, scheme=config)
            elif isinstance(config, schemes.CalibratedWaterfillConfig):
                statistics = statistics or merged(statistics_of(model, tokenizer))
                described = describe(model, {index: own.layer for index, own in statistics.items()})
                found[name] = Calibration(*share_out(statistics, config), described, {}, {})
            elif config.needs_calibration:
                ids = (texts.tokens(tokenizer, text, SKIPPED + CALIBRATED * LENGTH) for text in texts.available())
                data = [part for text in ids for part in text[0, SKIPPED:].split(LENGTH)]
                found[name] = calibrate(model, data, config, work=work)
    return found


def schemes_of(model, tokenizer, rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The scheme of each row, which are fields of `waterfill` or of the scheme that they name."""
    return calibrated(model, tokenizer, {name: {"scheme": "waterfill", **row} for name, row in rows.items()})


def main(table: Mapping[str, Any] = ROWS, description: str | None = __doc__, schemes_of: Callable = schemes_of) -> None:
    """Measure the schemes that ``schemes_of`` makes of the rows of ``table``, and print them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default SmolLM2-135M-Instruct")
    parser.add_argument("--text", help="files to score instead of the texts that come with kvpass, or names of those")
    parser.add_argument("--then", metavar="FILE", help="what follows behind every prompt, instead of the text itself")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt; default 1024")
    parser.add_argument("--scored", type=int, default=512, help="tokens behind it that are scored; default 512")
    parser.add_argument("rows", nargs="*", default=list(table), metavar="row", help="of the table, or names of schemes")
    args = parser.parse_args()
    model, tokenizer = models.load(args.model)
    half = copy.deepcopy(model).bfloat16()
    names = args.text.split(",") if args.text else texts.available()
    sources = {name: texts.tokens(tokenizer, name, args.prompt + args.scored) for name in names}
    if args.then:
        behind = texts.tokens(tokenizer, args.then, args.scored)
        sources = {name: torch.cat([ids[:, : args.prompt], behind], 1) for name, ids in sources.items()}
    chosen = schemes_of(model, tokenizer, {name: table.get(name, {"scheme": name}) for name in args.rows})
    results = quality.evaluate(model, sources, args.prompt, chosen, one_pass=True)
    print("| | bits at 8k | mean KL | top-1 |" + "".join(f" KL, {Path(name).stem} | top-1 |" for name in sources))
    print("|---|--:|--:|--:|" + "--:|--:|" * len(sources))
    for name, scheme in chosen.items():
        mine = [row for rows in results.values() for row in rows if row.scheme == name]
        cells = [f"{bits_at(half, scheme, [LONG])[LONG]:.2f}"]
        cells += [f"{fmean(row.kl for row in mine):.4f}", f"{fmean(row.top1 for row in mine):.1%}"]
        for row in mine:
            parts = torch.tensor(row.divergences).chunk(4) if args.then else []
            quarters = [f"{part.mean():.4f}" for part in parts]
            cells += [", ".join([f"{row.kl:.4f}", *quarters]), f"{row.top1:.1%}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
