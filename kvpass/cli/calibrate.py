"""``kvpass calibrate``: fit a scheme to a model."""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from .. import models, schemes
from ..calibration.default_texts import reading_for
from ..calibration.fit import calibrate
from ..errors import KVPassError
from ..schemes import AquaKVConfig
from .shared import TEXTS, at_least, names, say, stage

HELP = "Calibrate a scheme on a model: AQUA-KV predictors, KVQuant datatypes, QAQ query energies, waterfill bit widths."
DEFAULT = "waterfill"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass calibrate``."""
    fitted = ", ".join(name for name in schemes.available() if schemes.get(name).takes_calibration)
    parser.add_argument("--scheme", default=DEFAULT, help=f"one of {fitted}; default {DEFAULT}, for its static form")
    parser.add_argument("--out", metavar="FOLDER", help="folder for the result; default kvpass-SCHEME")
    own, others = (reading_for(schemes.get(name)) for name in (DEFAULT, "aqua"))
    parser.add_argument(
        "--text", help=f"{TEXTS}; default {','.join(own.sources)}, and for schemes other than waterfill "
        f"{','.join(others.sources)}",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=at_least(1), metavar="N",
        help=f"tokens per text; default {own.tokens} from all parts of the text, and for other schemes {others.tokens}",
    )  # fmt: skip
    parser.add_argument(
        "--length", type=at_least(1), metavar="N",
        help=f"tokens per sequence; default {own.length}, and for other schemes {others.length}",
    )  # fmt: skip
    parser.add_argument(
        "--layers-at-once", type=at_least(1), metavar="N",
        help="store the keys and values of 2 N layers at most on disk, and run the model once for each N; default all",
    )  # fmt: skip
    parser.add_argument(
        "--skip", type=at_least(0), metavar="N",
        help=f"skip the first N tokens; default {own.skip}, and for other schemes {others.skip}, which demo and eval "
        "use",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """``kvpass calibrate``."""
    config = schemes.get(args.scheme)
    out = Path(args.out or f"kvpass-{args.scheme}").expanduser()
    if not config.takes_calibration:
        raise KVPassError(f"{args.scheme!r} needs no calibration: apply it directly.")
    given = dict(sources=args.text and names(args.text), tokens=args.tokens, length=args.length, skip=args.skip)
    reading = replace(reading_for(config), **{name: value for name, value in given.items() if value is not None})
    model, tokenizer = models.load(args.model, say=say)
    data = reading.sequences(tokenizer)
    with stage(f"{args.scheme}: {len(data)} sequences of {reading.length} tokens of {', '.join(reading.sources)}"):
        calibration = calibrate(model, data, config, work=out / ".work", layers_at_once=args.layers_at_once)
    calibration.save(out)
    shutil.rmtree(out / ".work", ignore_errors=True)
    if isinstance(calibration.scheme, AquaKVConfig):
        print("layer  keys explained  values explained")
        for layer, (key, value) in calibration.explained.items():
            print(f"{layer:>5}  {key:>14.1%}  {value:>16.1%}")
        print(f"first layer: {calibration.scheme.first_layer}")
    print(calibration)
    print(f"\nSaved. kvpass.apply(model, kvpass.load({str(out)!r})), or --schemes {out}")
