"""Codecs of papers compared with KIVI on SmolLM2, in one table: python benchmarks/codecs.py [--text FILE,...] [row ...]

Columns are those of `benchmarks/waterfill.py`. Names are presets, with the windows and sinks of their papers; for a
fair comparison, there are rows of KIVI with those windows, too.
"""

from waterfill import main

PRESETS = (
    "kivi", "kivi-s8", "kivi-sinks", "kivi-4", "turboquant", "turboquant-3", "turboquant-4", "turboquant-prod",
    "turboquant-prod-4", "higgs", "e8", "kvarn-k2v2", "kvarn", "kvarn-k4v2-g128", "zipcache", "gear-l", "gear",
    "kvquant", "kvquant-3", "kitty", "kitty-25", "turboquant-2.5", "turboquant-3.5", "zipcache-salient", "polarquant-3",
    "polarquant",
)  # fmt: skip
ROWS = {
    **{name: dict(scheme=name) for name in PRESETS},
    "kivi, groups and window of 64": dict(scheme="kivi", group_size=64, residual=64),
    "kivi, the same, 1 sink, before RoPE": dict(scheme="kivi", group_size=64, residual=64, sinks=1, rope="pre"),
    "kitty, boosting nothing": dict(scheme="kitty", share=0.0),
    "kitty, window of 32, no sinks": dict(scheme="kitty", group_size=32, residual=32, sinks=0),
    "turboquant-2.5, pages of 128": dict(scheme="turboquant-2.5", residual=128),
    "zipcache, 3 bits, pages of 128": dict(scheme="zipcache", bits=3, residual=128, group_size=64),
    "kivi, 4 bits, groups of 64, window of 128": dict(scheme="kivi", bits=4, group_size=64, residual=128),
    "kvquant-calibrated": dict(scheme="kvquant-calibrated"),
    "kvquant-calibrated-3": dict(scheme="kvquant-calibrated-3"),
    "kvquant-calibrated, pages of 64": dict(scheme="kvquant-calibrated", residual=64),
    "kvquant-calibrated, points as fitted": dict(scheme="kvquant-calibrated", residual=64, normalized=False),
    "kvquant-calibrated, all tokens weigh alike": dict(scheme="kvquant-calibrated", residual=64, weighted=False),
    "kivi, 2 and 2 layers in 16 bits": dict(scheme="kivi", skip_layers=(2, 2)),
    "kivi, 2 and 2 layers in 4 bits": dict(scheme="kivi", skip_layers=(2, 2), skipped="kivi-4"),
}

if __name__ == "__main__":
    main(ROWS, __doc__)
