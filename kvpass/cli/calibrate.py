"""``kvpass calibrate``: fit a scheme to a model."""

import argparse
import shutil
from pathlib import Path

from torch import Tensor

from .. import models, schemes
from ..calibration.fit import calibrate
from ..errors import KVPassError
from ..eval import texts
from ..schemes import AquaKVConfig
from .shared import TEXTS, at_least, names, say, stage

HELP = "Fit a scheme to a model: predictors of AQUA-KV, datatypes of KVQuant, query energies of QAQ."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass calibrate``."""
    fitted = ", ".join(name for name in schemes.available() if schemes.get(name).takes_calibration)
    parser.add_argument("--scheme", default="aqua", help=f"one of {fitted}")
    parser.add_argument(
        "--out", default="kvpass-aqua", metavar="FOLDER", help="where the result goes; default kvpass-aqua"
    )
    parser.add_argument("--text", default="prose,code", help=TEXTS)
    parser.add_argument("--tokens", type=at_least(1), default=12288, metavar="N", help="tokens of each text")
    parser.add_argument("--length", type=at_least(1), default=1024, metavar="N", help="tokens of a sequence")
    parser.add_argument(
        "--skip", type=at_least(0), default=4096, metavar="N", help="first tokens left out: demo and eval use those"
    )


def run(args: argparse.Namespace) -> None:
    """``kvpass calibrate``."""
    config, out = schemes.get(args.scheme), Path(args.out).expanduser()
    if not config.takes_calibration:
        raise KVPassError(f"{args.scheme!r} needs no calibration: use it as it is.")
    count = args.tokens // args.length
    if not count:
        raise KVPassError(f"--tokens {args.tokens} make no sequence of --length {args.length}.")
    model, tokenizer = models.load(args.model, say=say)
    data: list[Tensor] = []
    for source in names(args.text):
        ids = texts.tokens(tokenizer, source, args.skip + count * args.length)[0, args.skip :]
        data.extend(ids.view(count, args.length))
    with stage(
        f"{args.scheme}: {len(data)} sequences of {args.length} tokens of {args.text}, from token {args.skip} on"
    ):
        calibration = calibrate(model, data, config, work=out / ".work")
    calibration.save(out)
    shutil.rmtree(out / ".work")
    if isinstance(calibration.scheme, AquaKVConfig):
        print("layer  keys explained  values explained")
        for layer, (key, value) in calibration.explained.items():
            print(f"{layer:>5}  {key:>14.1%}  {value:>16.1%}")
        print(f"first layer: {calibration.scheme.first_layer}")
    print(calibration)
    print(f"\nSaved. kvpass.apply(model, kvpass.load({str(out)!r})), or --schemes {out}")
