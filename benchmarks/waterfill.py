"""Ablation of `waterfill`, and other schemes: python benchmarks/waterfill.py [--model M] [--text FILE,...] [row ...]

All rows are scored in one pass after the same prompts. Bits are those of a cache of 8,192 tokens in bfloat16,
everything counted; KL and agreement are those of `kvpass eval`.

How the statistics of a prompt age, in quarters of the tokens scored after it:

    python benchmarks/waterfill.py --text prose --then code --prompt 512 --scored 2048 waterfill
"""

import argparse
import copy
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from kvpass import calibrate, models, schemes
from kvpass.cli.calibrate import sequences as spread
from kvpass.eval import bits_at, quality, texts
from kvpass.layout.retention import Recent, Sinks

LONG = 8192  # tokens of the caches whose bits are reported
CALIBRATED, LENGTH, SKIPPED = 8, 1024, 4096  # sequences per text, their tokens, and the scored tokens before them
SHARED = 0, 4, 768, True  # skip, count, length and spread, where a calibration sets bit widths
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
    "waterfill-2": dict(scheme="waterfill-2"),
    "waterfill-3": dict(scheme="waterfill-3"),
    "static": dict(scheme="waterfill-static"),
    "static, one bit width for all tokens": dict(scheme="waterfill-static", ranked=False),
    "hybrid": dict(scheme="waterfill-hybrid"),
    **{name: dict(scheme=name) for name in RIVALS},
    "kivi, the same tokens exact": dict(scheme="kivi", retention=Sinks(4) + Recent(128, page_size=32)),
    "kivi-3, the same tokens exact": dict(scheme="kivi-3", retention=Sinks(4) + Recent(128, page_size=32)),
}


def calibrated(model, tokenizer, rows: Mapping[str, str | dict[str, Any]]) -> dict[str, Any]:
    """The scheme of each row; those that need it are calibrated on the texts that come with kvpass."""
    found: dict[str, Any] = {name: schemes.get(scheme) for name, scheme in rows.items()}
    with tempfile.TemporaryDirectory() as work:
        for name, config in found.items():
            if isinstance(config, schemes.CalibratedWaterfillConfig):
                data = [part for text in texts.to_calibrate() for part in spread(tokenizer, text, *SHARED)]
                found[name] = calibrate(model, data, config)
            elif config.needs_calibration:
                ids = (texts.tokens(tokenizer, text, SKIPPED + CALIBRATED * LENGTH) for text in texts.available())
                data = [part for text in ids for part in text[0, SKIPPED:].split(LENGTH)]
                found[name] = calibrate(model, data, config, work=work)
    return found


def main(table: Mapping[str, dict[str, Any]] = ROWS, description: str | None = __doc__) -> None:
    """Measure rows of ``table``, each the fields of a scheme, and print them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default SmolLM2-135M-Instruct")
    parser.add_argument("--text", help="files to score instead of the texts that come with kvpass, or names of those")
    parser.add_argument("--then", metavar="FILE", help="what follows behind every prompt, instead of the text itself")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt; default 1024")
    parser.add_argument("--scored", type=int, default=512, help="tokens behind it that are scored; default 512")
    parser.add_argument("rows", nargs="*", default=list(table), metavar="row")
    args = parser.parse_args()
    model, tokenizer = models.load(args.model)
    half = copy.deepcopy(model).bfloat16()
    names = args.text.split(",") if args.text else texts.available()
    sources = {name: texts.tokens(tokenizer, name, args.prompt + args.scored) for name in names}
    if args.then:
        behind = texts.tokens(tokenizer, args.then, args.scored)
        sources = {name: torch.cat([ids[:, : args.prompt], behind], 1) for name, ids in sources.items()}
    chosen = calibrated(model, tokenizer, {name: {"scheme": "waterfill", **table[name]} for name in args.rows})
    results = quality.evaluate(model, sources, args.prompt, chosen, one_pass=True)
    print("| | bits at 8k |" + "".join(f" KL, {name} | top-1 |" for name in sources))
    print("|---|--:|" + "--:|--:|" * len(sources))
    for name, scheme in chosen.items():
        cells = [f"{bits_at(half, scheme, [LONG])[LONG]:.2f}"]
        for rows in results.values():
            (row,) = (one for one in rows if one.scheme == name)
            parts = torch.tensor(row.divergences).chunk(4) if args.then else []
            quarters = [f"{part.mean():.4f}" for part in parts]
            cells += [", ".join([f"{row.kl:.4f}", *quarters]), f"{row.top1:.1%}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
