"""Format measurements for reading and for storing: aligned text, Markdown, CSV and JSON."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .quality import Quality

Column = tuple[str, Callable[[Quality], str]]
Bits = Mapping[str, Mapping[int, float | None]]  # scheme -> tokens -> bits per value, None if it depends on the text

_BF16_BYTES = 2
_FIELDS = ("nbytes", "values", "bits_per_value", "kl", "log_kl", "top1", "perplexity")


def thousands(tokens: int) -> str:
    """8192 -> "8k"."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def memory_columns(dtype: torch.dtype) -> list[Column]:
    """Bytes, and the ratio to a bfloat16 cache and to one in ``dtype``."""

    def share(itemsize: int) -> Callable[[Quality], str]:
        return lambda row: f"{row.nbytes / (row.values * itemsize):.3f}x"

    return [
        ("bytes", lambda row: f"{row.nbytes:,}"),
        ("bits/value", lambda row: f"{row.bits_per_value:.2f}"),
        ("of bfloat16", share(_BF16_BYTES)),
        (f"of {str(dtype).removeprefix('torch.')}", share(dtype.itemsize)),
    ]


def bits_columns(bits: Bits) -> list[Column]:
    """Bits per value at the scored length, and at each length of ``bits``."""

    def at(tokens: int) -> Callable[[Quality], str]:
        return lambda row: "-" if (found := bits[row.scheme][tokens]) is None else f"{found:.2f}"

    lengths = next(iter(bits.values()), {})
    return [
        ("bits/value", lambda row: f"{row.bits_per_value:.2f}"),
        *((f"at {thousands(tokens)}", at(tokens)) for tokens in lengths),
    ]


QUALITY: list[Column] = [
    ("mean KL", lambda row: f"{row.kl:.4f}"),
    ("95 %", lambda row: f"±{row.kl_error:.4f}"),
    ("mean log KL", lambda row: f"{row.log_kl:.2f}"),
    ("top-1", lambda row: f"{row.top1:.1%}"),
    ("perplexity", lambda row: f"{row.perplexity:.2f}"),
]
SPEED: list[Column] = [("tokens/s", lambda row: f"{row.tokens_per_second:.1f}" if row.step_seconds else "one pass")]


def _cells(rows: Sequence[Quality], columns: Sequence[Column]) -> list[list[str]]:
    return [
        ["cache", *(name for name, _ in columns)],
        *([row.scheme, *(show(row) for _, show in columns)] for row in rows),
    ]


def aligned(rows: Sequence[Quality], columns: Sequence[Column]) -> str:
    """A table for a terminal."""
    head, *lines = _cells(rows, columns)
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, lines)])


def markdown(rows: Sequence[Quality], columns: Sequence[Column]) -> str:
    """The same in Markdown."""
    head, *lines = _cells(rows, columns)
    rule = ["---", *["--:"] * len(columns)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *lines])


def pairs(rows: Sequence[Quality]) -> list[str]:
    """Each scheme compared with the next best one, paired by token."""
    ranked = sorted(rows, key=lambda row: row.kl)
    return [
        f"{better.scheme} against {worse.scheme}: {better.beats(worse):.1f} standard errors"
        for better, worse in pairwise(ranked)
    ]


def _finite(number: float | None) -> float | None:
    return number if number is None or math.isfinite(number) else None


def record(row: Quality, bits: Bits) -> dict[str, Any]:
    """The measurements of one scheme as plain data; errors are half the width of 95 % intervals."""
    return {
        "scheme": row.scheme,
        **{name: getattr(row, name) for name in _FIELDS},
        **{f"{name}_error": _finite(error) for name, error in row.errors.items()},
        "tokens_per_second": row.tokens_per_second if row.step_seconds else None,
        **{f"bits_per_value_at_{tokens}": found for tokens, found in bits[row.scheme].items()},
    }


def as_csv(results: Mapping[str, Sequence[Quality]], bits: Bits) -> str:
    """One line per text and scheme; errors are half the width of 95 % intervals."""
    lines = [{"text": text, **record(row, bits)} for text, rows in results.items() for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def as_json(results: Mapping[str, Sequence[Quality]], bits: Bits, model: nn.Module, context: int, score: int) -> str:
    """Everything measured, including the divergence of every token. ``beats`` says by how many standard errors each
    scheme is below each other one, paired by token."""
    texts = {
        text: [
            {
                **record(row, bits),
                "beats": {other.scheme: round(row.beats(other), 2) for other in rows if other is not row},
                "divergences": [float(f"{divergence:.5g}") for divergence in row.divergences],
            }
            for row in rows
        ]
        for text, rows in results.items()
    }
    about = {
        "model": getattr(model.config, "_name_or_path", "").rstrip("/").rsplit("/", 1)[-1] or type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": context,
        "score": score,
        "versions": {name: version(name) for name in ("kvpass", "torch", "transformers")},
    }
    return json.dumps({**about, "texts": texts}, indent=1) + "\n"
