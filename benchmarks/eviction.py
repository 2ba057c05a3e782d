"""Eviction and QAQ on SmolLM2, with all bits counted: python benchmarks/eviction.py [--score N] [--work DIR] [row ...]

H2O at 20 % and 50 % of the tokens, alone and over codecs (after table 7 of AQUA-KV), and QAQ compared with uniform bit
widths per token, with and without exact outliers. Every row is scored token by token through the packed cache, on the
real continuation of a prompt of 1,024 tokens. Bits per value are over all tokens seen and include the predictors of
AQUA-KV.
"""

import argparse
import tempfile

from aqua_ablation import PROMPT, calibration_data

import kvpass
from kvpass import HeavyHitter, StreamingLLM, models
from kvpass.eval import quality, texts
from kvpass.schemes import QAQConfig, compose, get

POLICIES = {  # for about 1,100 tokens
    "H2O 20 %": HeavyHitter(96, recent=96),
    "H2O 50 %": HeavyHitter(256, recent=256),
    "H2O 20 %, 32 recent": HeavyHitter(160, recent=32),
    "H2O 50 %, 32 recent": HeavyHitter(480, recent=32),
    "StreamingLLM 20 %": StreamingLLM(4, recent=192),
    "StreamingLLM 50 %": StreamingLLM(4, recent=512),
}
CODECS = {"full precision": "identity", "kivi": "kivi", "higgs": "higgs", "aqua": "aqua"}
UNIFORM = {
    f"{width} bits, {share:.0%} exact": QAQConfig(widths=(width,), outliers=share)
    for width in (3, 4)
    for share in (0.0, 0.01)
}
QAQ = {
    f"qaq, sigma_s={sigma_s}, sigma_x={sigma_x}": QAQConfig(sigma_s=sigma_s, sigma_x=sigma_x)
    for sigma_s, sigma_x in ((0.0003, 0.001), (0.001, 0.003), (0.001, 0.01), (0.003, 0.01))
}
ROWS = {
    **{f"{codec}, {policy}": (scheme, policy) for policy in POLICIES for codec, scheme in CODECS.items()},
    **{name: (config, None) for name, config in {**UNIFORM, **QAQ}.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--score", type=int, default=128)
    parser.add_argument("--work", help="folder that keeps the keys and values AQUA-KV is fitted to")
    parser.add_argument("rows", nargs="*", help="names of rows; all of them by default")
    args = parser.parse_args()
    model, tokenizer = models.load()
    scored = {source: texts.tokens(tokenizer, source, PROMPT + args.score) for source in texts.available()}
    print("| | bits/value | " + " | ".join(f"KL, {source} | top-1" for source in scored) + " |")
    print("|---|--:|" + "--:|--:|" * len(scored), flush=True)
    calibration = None
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.rows or ROWS:
            scheme, policy = get(ROWS[name][0]), POLICIES.get(ROWS[name][1])
            if scheme.needs_calibration:
                if calibration is None:
                    data = calibration_data(tokenizer)
                    calibration = kvpass.calibrate(model, data, scheme, work=args.work or temporary)
                scheme = calibration if policy is None else calibration.retaining(policy)
            elif policy is not None:
                scheme = compose(scheme, policy)
            results = [quality for (quality,) in quality.evaluate(model, scored, PROMPT, {name: scheme}).values()]
            cells = [f"{quality.kl:.4f} | {quality.top1:.1%}" for quality in results]
            print("| " + " | ".join([name, f"{results[0].bits_per_value:.2f}", *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
