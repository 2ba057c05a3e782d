"""The papers' tables in miniature: their rows, the schemes that stand for them here, and the papers' figures.

A row without a figure is not in the paper: it is a baseline that the table lacks. Windows are the papers'. Heads have
64 channels here and 128 in the papers' models, so anything that is stored per token or head weighs twice as much.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpass import HeavyHitter, LogSparseEviction, Recent, Sinks, SnapKV, StreamingLLM
from kvpass.schemes import (
    AquaKVConfig,
    AsymKVConfig,
    GEARConfig,
    HIGGSConfig,
    IdentityConfig,
    KIVIConfig,
    KVQuantConfig,
    QuaRotConfig,
    RTNConfig,
    SchemeConfig,
    SQuatConfig,
    XQuantConfig,
    ZipCacheConfig,
    get,
)


@dataclass(frozen=True)
class Row:
    """name: the row's name in the paper; scheme: what stands for it here; figure: the paper's, if the row is its."""

    name: str
    scheme: SchemeConfig | str
    figure: float | None = None


@dataclass(frozen=True)
class Table:
    """paper, source: which table of which paper, and the model it is of; figure: what its figures are.

    lower: whether lower figures are better.
    prompt, scored: tokens of the text that are read in one call, and that are scored.
    """

    paper: str
    source: str
    figure: str
    rows: Sequence[Row]
    lower: bool = False
    prompt: int = 1024
    scored: int = 256


def _values(**fields: Any) -> dict[str, Any]:
    """Values that leave their window four at a time, as close to the papers' one as bytes allow."""
    return {"value_page": 4, **fields}


def _squat(**fields: Any) -> SQuatConfig:
    return SQuatConfig(**{"lam": 1e-3, **_values(**fields)})


_SQUAT = Table(
    "SQuat",
    "table 1, Llama-3.1-8B-Instruct",
    "mean of six tasks, %",
    [
        Row("KIVI", KIVIConfig(**_values()), 44.86),
        Row("GEAR", GEARConfig(), 45.17),
        Row("ZipCache", ZipCacheConfig(share=0.375, residual=128), 44.08),
        Row("SQuat", _squat(), 46.97),
        Row("SQuat-pre", _squat(rope="pre"), 47.86),
        Row("SQuat, our strength", SQuatConfig(**_values())),
        Row("GEAR, matrices over 256 tokens", GEARConfig(residual=256)),
        Row("KIVI, HQQ's zero points", KIVIConfig(fit="hqq", **_values())),
    ],
)
_LAMBDAS = {  # table 3: rank -> accuracy by lambda
    5: {1e-4: 71.72, 5e-4: 73.09, 1e-3: 72.71, 1e-2: 70.96, 1e-1: 4.47},
    40: {1e-4: 72.63, 5e-4: 72.48, 1e-3: 72.18, 1e-2: 66.95, 1e-1: 6.67},
}
_SQUAT_LAMBDA = Table(
    "SQuat",
    "table 3, Llama-3.1-8B-Instruct",
    "GSM8K, %",
    [
        Row(f"lambda {lam:g}, r = {rank}", _squat(lam=lam, rank=rank), figure)
        for rank, figures in _LAMBDAS.items()
        for lam, figure in figures.items()
    ],
)
_LOGQUANT = Table(
    "LogQuant",
    "tables 1 and 4, Llama-3.1-8B-Instruct, at R = 128",
    "GSM8K, %",
    [
        Row("KIVI, 4 bits", KIVIConfig(bits=4, residual=192, group_size=64, **_values()), 67.24),
        Row("KIVI", KIVIConfig(residual=192, group_size=64, **_values()), 18.04),
        Row("KIVI, 2 sinks", KIVIConfig(residual=192, group_size=64, sinks=2, **_values()), 18.49),
        Row("LogQuant", get("logquant-192"), 40.41),
        Row("KIVI, as many exact tokens, the newest", KIVIConfig(group_size=64, retention=Recent(192, 64))),
        Row("the same, 1 sink", KIVIConfig(group_size=64, retention=Sinks(1) + Recent(192, 64))),
    ],
)
_LOGQUANT_EVICTION = Table(
    "LogQuant",
    "table 2, Llama-3.1-8B-Instruct, at R = 128",
    "L1 error of attention on GSM8K",
    [
        Row("LogQuant, 2 bits", get("logquant-192"), 432.50),
        Row("KIVI, 2 bits", KIVIConfig(residual=192, group_size=64, **_values()), 556.10),
        Row("LogQuant, eviction", IdentityConfig(retention=LogSparseEviction(64)), 1076.70),
        Row("KIVI, eviction", IdentityConfig(retention=StreamingLLM(0, recent=192, exact=128, page_size=64)), 1612.56),
        Row("KIVI, eviction, 1 sink", IdentityConfig(retention=StreamingLLM(1, recent=192, exact=128, page_size=64))),
        Row("SnapKV", IdentityConfig(retention=SnapKV(160))),
        Row("H2O", IdentityConfig(retention=HeavyHitter(96, recent=96))),
    ],
    lower=True,
)
_XQUANT = Table(
    "XQuant",
    "table 3, Mistral-7B-Instruct",
    "mean of LongBench tasks",
    [
        Row("KIVI", KIVIConfig(residual=128, **_values()), 41.38),
        Row("AsymKV, 1.5 bits", AsymKVConfig(residual=128, **_values(value_page=8)), 39.86),
        Row("XQuant, 1.38 bits", get("xquant-128", **_values(value_page=8)), 41.98),
        Row("KIVI with eta", KIVIConfig(residual=128, eta=0.045, **_values())),
        Row("AsymKV with eta", get("asymkv-eta", residual=128, **_values(value_page=8))),
        Row("AsymKV, 1.38 bits, with eta", AsymKVConfig(
            residual=128, l_k=30, l_v=2, eta_1=1 / 6, eta_2=0.045, **_values(value_page=8))),
    ],
)  # fmt: skip
_ASYMKV = Table(
    "XQuant",
    "table 1, Mistral-7B-Instruct: 2-bit layers of keys and of values, of 32",
    "MultiFieldQA-zh",
    [
        Row(f"{keys}/32", AsymKVConfig(l_k=keys, l_v=32, residual=128, **_values(value_page=8)), figure)
        for keys, figure in ((32, 42.27), (24, 37.10), (16, 21.36), (8, 13.16), (0, 7.66))
    ],
)
_ETA = Table(
    "XQuant",
    "table 4, Mistral-7B-Instruct: eta of 1-bit and of 2-bit layers",
    "MultiFieldQA-zh",
    [
        Row(f"eta {first:g}, {second:g}", XQuantConfig(
            residual=128, eta_1=first, eta_2=second, **_values(value_page=8)), figure)
        for first, second, figure in ((0.0, 0.0, 37.20), (0.0, 0.05, 40.32), (0.2, 0.0, 41.98), (0.2, 0.05, 44.20))
    ],
)  # fmt: skip
_GAMMA = [  # the middle of the paper's interval, or an end of it -> its figure
    (0.75 / 6, 12.20), (5 / 24, 14.05), (3 / 8, 16.84), (5 / 8, 17.32), (19 / 24, 17.60), (5.5 / 6, 17.32),
]  # fmt: skip
_HALVES = dict(residual=128, weights=(0.5, 0.5))
_MERGE = Table(
    "XQuant",
    "table 5, Mistral-7B-Instruct: how the codes of two layers are merged",
    "MuSiQue",
    [
        Row("KIVI", KIVIConfig(residual=128, **_values()), 18.13),
        Row("floor", XQuantConfig(rounding="floor", **_HALVES, **_values(value_page=8)), 16.79),
        Row("ceiling", XQuantConfig(rounding="ceil", **_HALVES, **_values(value_page=8)), 16.36),
        *(
            Row(f"average, gamma {gamma:.3g}", XQuantConfig(
                residual=128, weights=(gamma, 1 - gamma), **_values(value_page=8)), figure)
            for gamma, figure in _GAMMA
        ),
        Row("groups of three, the first's codes", XQuantConfig(residual=128, group_layers=3, **_values(value_page=8))),
    ],
)  # fmt: skip
_QAQ_PAPER = dict(sigma_s=0.02, sigma_x=0.05)
_QAQ = Table(
    "QAQ",
    "tables 2 and 3, LLaMA 2 7B",
    "HellaSwag, share",
    [
        Row("without outliers", get("qaq-paper", outliers=0.0, **_QAQ_PAPER), 0.572),
        Row("window of 1", get("qaq-paper", window=1, **_QAQ_PAPER), 0.722),
        Row("window of 5", get("qaq-paper", **_QAQ_PAPER), 0.730),
        Row("window of 5, bits only fall", get("qaq-paper", keep_originals=False, **_QAQ_PAPER)),
        Row("a choice per page of 32", get("qaq-paper", every="page", residual=32, **_QAQ_PAPER)),
        Row("a choice per token, pages of 32", get("qaq-paper", residual=32, **_QAQ_PAPER)),
        Row("KIVI, window of 32", KIVIConfig(**_values())),
    ],
    prompt=512,
    scored=48,
)
_ACROSS = dict(group_size=1024, across_heads=True)


def _aqua(**fields: Any) -> AquaKVConfig:
    return get("aqua-paper", **fields)


_AQUA = Table(
    "AQUA-KV",
    "table 1, Llama 3.2 3B",
    "WikiText-2 perplexity",
    [
        Row("Quant, 2 bits, g = 64", RTNConfig(bits=2, group_size=64, residual=128, sinks=4), 21.56),
        Row("KIVI, 2 bits, g = 128", get("kivi-128", value_page=4), 9.33),
        Row("KVQuant, 2 bits, 1 %", KVQuantConfig(bits=2, share=0.01, residual=128), 9.43),
        Row("QuaRot, 2 bits, g = 1024", QuaRotConfig(bits=2, residual=128, sinks=4, **_ACROSS), 44.68),
        Row("HIGGS, 2 bits, g = 1024", HIGGSConfig(residual=128, sinks=4, **_ACROSS), 7.47),
        Row("AQUA-KV (Quant, g = 64)", _aqua(backbone=RTNConfig(bits=2, group_size=64), rope="post"), 10.33),
        Row("AQUA-KV (QuaRot, g = 1024)", _aqua(backbone=QuaRotConfig(bits=2, **_ACROSS)), 8.44),
        Row("AQUA-KV (HIGGS, g = 1024)", _aqua(), 7.03),
        Row("HIGGS, 2 bits, a group per head", HIGGSConfig(residual=128, sinks=4)),
        Row("AQUA-KV (HIGGS), groups per head, calibrated first layer", AquaKVConfig(residual=128, predictor="linear")),
    ],
    lower=True,
)
_FIRST = {bits: HIGGSConfig(grid=grid, **_ACROSS) for bits, grid in ((2, "d2n16"), (3, "d2n64"))}
_PARTS = Table(
    "AQUA-KV",
    "table 9, Llama 3.2 3B: predictors, first layer, sinks, rotary embedding",
    "WikiText-2 perplexity",
    [
        Row("linear, first layer of 4 bits, 4 sinks", _aqua(), 7.03),
        Row("MLP", _aqua(predictor="mlp"), 7.03),
        Row("reduced rank, a quarter", _aqua(predictor="low-rank", rank=48), 7.22),
        Row("linear, 4-bit weights (GPTQ)", _aqua(predictor="linear-4"), 7.03),
        Row("only bias", _aqua(predictor="bias"), 7.24),
        Row("first layer in full precision", _aqua(first_layer="identity"), 7.03),
        Row("first layer of 3 bits", _aqua(first_layer=_FIRST[3]), 7.03),
        Row("first layer of 2 bits", _aqua(first_layer=_FIRST[2]), 7.05),
        Row("no sinks", _aqua(sinks=0), 7.15),
        Row("64 sinks", _aqua(sinks=64), 7.01),
        Row("keys after rotary embedding", _aqua(rope="post"), 7.05),
    ],
    lower=True,
)
_INPUTS = Table(
    "AQUA-KV",
    "table 9, Llama 3.2 3B: what predictors read and are fitted to",
    "WikiText-2 perplexity",
    [
        Row("K to K, V and K to V", _aqua(), 7.03),
        Row("without V predictor", _aqua(predicted="keys"), 7.06),
        Row("without K predictor", _aqua(predicted="values"), 7.50),
        Row("without K to V", _aqua(values_from="values"), 7.04),
        Row("without V to V", _aqua(values_from="keys"), 7.04),
        Row("from the two layers below", _aqua(layers_below=(1, 2)), 7.02),
        Row("from the layer two below alone", _aqua(layers_below=(2,)), 7.04),
        Row("fitted to original keys and values", _aqua(fit_on="original"), 7.13),
    ],
    lower=True,
)

TABLES = {
    "squat": _SQUAT,
    "squat-lambda": _SQUAT_LAMBDA,
    "logquant": _LOGQUANT,
    "logquant-eviction": _LOGQUANT_EVICTION,
    "xquant": _XQUANT,
    "xquant-asymkv": _ASYMKV,
    "xquant-eta": _ETA,
    "xquant-merge": _MERGE,
    "qaq": _QAQ,
    "aqua": _AQUA,
    "aqua-parts": _PARTS,
    "aqua-inputs": _INPUTS,
}


def resolved(row: Row) -> Row:
    """``row`` with a config in place of a name."""
    return replace(row, scheme=get(row.scheme))
