"""``kvpass calibrate``: fit a scheme to a model."""

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import models, schemes
from ..calibration.fit import calibrate
from ..errors import KVPassError
from ..eval import texts
from ..schemes import AquaKVConfig, CalibratedWaterfillConfig, WaterfillConfig
from .shared import TEXTS, at_least, names, say, stage

HELP = "Calibrate a scheme on a model: AQUA-KV predictors, KVQuant datatypes, QAQ query energies, waterfill bit widths."
_TOKENS, _LENGTH, _SKIP = 12288, 1024, 4096
_SHARED_TOKENS, _SHARED_LENGTH = 3072, 768  # for calibrations that also run backward passes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass calibrate``."""
    fitted = ", ".join(name for name in schemes.available() if schemes.get(name).takes_calibration)
    parser.add_argument("--scheme", default="aqua", help=f"one of {fitted}")
    parser.add_argument("--out", metavar="FOLDER", help="folder for the result; default kvpass-SCHEME")
    own = ",".join(texts.to_calibrate())
    parser.add_argument("--text", help=f"{TEXTS}; default prose,code, and for waterfill {own}")
    parser.add_argument(
        "--tokens", type=at_least(1), metavar="N",
        help=f"tokens per text; default {_TOKENS}, and for waterfill {_SHARED_TOKENS} from all parts of the text",
    )  # fmt: skip
    parser.add_argument(
        "--length", type=at_least(1), metavar="N",
        help=f"tokens per sequence; default {_LENGTH}, and for waterfill {_SHARED_LENGTH}",
    )  # fmt: skip
    parser.add_argument(
        "--skip", type=at_least(0), metavar="N",
        help=f"skip the first N tokens, which demo and eval use; default {_SKIP}, and for waterfill 0",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """``kvpass calibrate``."""
    config = schemes.get(args.scheme)
    out = Path(args.out or f"kvpass-{args.scheme}").expanduser()
    if not config.takes_calibration:
        raise KVPassError(f"{args.scheme!r} needs no calibration: apply it directly.")
    shared = isinstance(config, (CalibratedWaterfillConfig, WaterfillConfig))
    sources = names(args.text or ("prose,code" if not shared else ",".join(texts.to_calibrate())))
    tokens = args.tokens or (_SHARED_TOKENS if shared else _TOKENS)
    length = args.length or (_SHARED_LENGTH if shared else _LENGTH)
    skip = (0 if shared else _SKIP) if args.skip is None else args.skip
    count = tokens // length
    if not count:
        raise KVPassError(
            f"--tokens {tokens} is less than one sequence of --length {length}: raise --tokens or lower --length."
        )
    model, tokenizer = models.load(args.model, say=say)
    data: list[Tensor] = []
    for source in sources:
        data.extend(sequences(tokenizer, source, skip, count, length, spread=shared))
    with stage(f"{args.scheme}: {len(data)} sequences of {length} tokens of {', '.join(sources)}"):
        calibration = calibrate(model, data, config, work=out / ".work")
    calibration.save(out)
    shutil.rmtree(out / ".work", ignore_errors=True)
    if isinstance(calibration.scheme, AquaKVConfig):
        print("layer  keys explained  values explained")
        for layer, (key, value) in calibration.explained.items():
            print(f"{layer:>5}  {key:>14.1%}  {value:>16.1%}")
        print(f"first layer: {calibration.scheme.first_layer}")
    print(calibration)
    print(f"\nSaved. kvpass.apply(model, kvpass.load({str(out)!r})), or --schemes {out}")


def sequences(
    tokenizer: PreTrainedTokenizerBase, source: str, skip: int, count: int, length: int, spread: bool
) -> list[Tensor]:
    """``count`` sequences ``[length]`` of a text, after its first ``skip`` tokens: consecutive, or ``spread`` over the
    whole text."""
    if not spread:
        ids = texts.tokens(tokenizer, source, skip + count * length)[0, skip:]
        return list(ids.view(count, length))
    ids = torch.tensor(tokenizer(texts.read(source), verbose=False)["input_ids"])[skip:]
    if len(ids) < count * length:
        raise KVPassError(f"The text {source!r} has {len(ids)} tokens, but {count * length} are needed: ask for fewer.")
    starts = [i * (len(ids) - length) // max(1, count - 1) for i in range(count)]
    return [ids[start : start + length] for start in starts]
