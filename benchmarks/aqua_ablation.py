"""Ablation of AQUA-KV on SmolLM2, after table 1 of the paper: python benchmarks/aqua_ablation.py [--score N] [row ...]

All rows are fitted to the same tokens and scored on the same other ones, token by token through the packed cache. Rows
are printed as they finish, as Markdown. Bits per value are those of the cache at the end, without and with the
predictors.
"""

import argparse
import tempfile

import torch

import kvpass
from kvpass import models
from kvpass.eval import quality, texts

PROMPT, SKIP, LENGTH, SEQUENCES = 1024, 4096, 1024, 12

ROWS = {
    "aqua": dict(scheme="aqua"),
    "linear, 16-bit weights": dict(scheme="aqua", predictor="linear"),
    "low rank 96, 4-bit": dict(scheme="aqua", predictor="low-rank-4", rank=96),
    "low rank 48, 4-bit": dict(scheme="aqua", predictor="low-rank-4", rank=48),
    "mlp, 16-bit": dict(scheme="aqua", predictor="mlp"),
    "window of 128": dict(scheme="aqua", residual=128),
    "first layer exact": dict(scheme="aqua", first_layer="identity"),
    "first layer higgs-3": dict(scheme="aqua", first_layer="higgs-3"),
    "first layer higgs-2": dict(scheme="aqua", first_layer="higgs"),
    "without sinks": dict(scheme="aqua", sinks=0),
    "without K predictor": dict(scheme="aqua", predicted="values"),
    "without V predictor": dict(scheme="aqua", predicted="keys"),
    "from the two layers below": dict(scheme="aqua", layers_below=(1, 2)),
    "from the layer two below alone": dict(scheme="aqua", layers_below=(2,)),
    "after RoPE": dict(scheme="aqua", rope="post"),
    "fitted to original K and V": dict(scheme="aqua", fit_on="original"),
    "over kivi": dict(scheme="aqua-kivi"),
    "over quarot-2": dict(scheme="aqua-quarot"),
    "over rtn-2": dict(scheme="aqua-rtn"),
    "over higgs-3": dict(scheme="aqua-3"),
    "higgs alone": dict(scheme="higgs", sinks=4, rope="pre"),
    "kivi alone": dict(scheme="kivi", sinks=4, rope="pre"),
    "quarot-2 alone": dict(scheme="quarot-2", sinks=4, rope="pre"),
    "rtn-2 alone": dict(scheme="rtn-2", sinks=4, rope="pre"),
    "higgs-3 alone": dict(scheme="higgs-3", sinks=4, rope="pre"),
    "kivi as it is": dict(scheme="kivi"),
}


def calibration_data(tokenizer) -> list[torch.Tensor]:
    count = SKIP + SEQUENCES * LENGTH
    both = [texts.tokens(tokenizer, source, count)[0, SKIP:] for source in texts.available()]
    return [ids for text in both for ids in text.view(SEQUENCES, LENGTH)]


def row(name: str, scheme, results) -> str:
    nbytes = scheme.nbytes if isinstance(scheme, kvpass.Calibration) else 0
    shares = ""
    if nbytes:
        explained = torch.tensor(list(scheme.explained.values())).mean(0)
        shares = f"{explained[0]:.1%} / {explained[1]:.1%}"
    (first, *_), *_ = results.values()
    bits = first.bits_per_value
    cells = [name, f"{bits - 8 * nbytes / first.values:.2f}", f"{bits:.2f}", f"{nbytes:,}", shares]
    return "| " + " | ".join([*cells, *(f"{quality.kl:.4f}" for (quality,) in results.values())]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--score", type=int, default=64)
    parser.add_argument("--work", help="folder that keeps the keys and values, for several runs to share")
    parser.add_argument("rows", nargs="*", help="names of rows; all of them by default")
    args = parser.parse_args()
    model, tokenizer = models.load()
    scored = {source: texts.tokens(tokenizer, source, PROMPT + args.score) for source in texts.available()}
    data = calibration_data(tokenizer)
    kls = " | ".join(f"KL, {source}" for source in scored)
    print(f"| | bits/value | with predictors | predictors, bytes | K / V explained | {kls} |")
    print("|---|--:|--:|--:|--:|" + "--:|" * len(scored), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.rows or ROWS:
            scheme = kvpass.schemes.get(ROWS[name])
            if scheme.needs_calibration:
                scheme = kvpass.calibrate(model, data, scheme, work=args.work or temporary)
            results = quality.evaluate(model, scored, PROMPT, {name: scheme})
            print(row(name, scheme, results), flush=True)


if __name__ == "__main__":
    main()
