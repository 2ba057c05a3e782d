"""Tokens as functions of what the same tokens dequantize to in the layer below (AQUA-KV, arXiv 2501.19392).

They are subtracted before tokens are coded, and added again when those are dequantized: only what the layer below does
not know has to be coded. All KV heads of a layer are predicted together, from ``[T, H * D]``.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KVPassError
from .affine import dequantize
from .bitpack import byte_rows, unpack

MATRICES = {"linear": 1, "low-rank": 2, "mlp": 2}
"""Weight matrices of each kind."""
OF_FOUR_BITS = ("linear", "low-rank")
"""Those of them whose weights may have 4 bits."""
PREDICTORS = (*MATRICES, *(f"{kind}-4" for kind in OF_FOUR_BITS))
GROUP = 64
"""Outputs that share a scale in 4-bit weights."""


@cache
def parse_predictor(text: str) -> tuple[str, int]:
    """Kind and width of the weights: "linear-4" is a linear map with 4-bit weights. Raises `KVPassError`."""
    if text not in PREDICTORS:
        raise KVPassError(f"There is no predictor {text!r}; choose one of {', '.join(PREDICTORS)}.")
    return (text.removesuffix("-4"), 4) if text.endswith("-4") else (text, 16)


def matrix(parts: Sequence[Tensor]) -> Tensor:
    """A weight matrix ``[out, in]`` float32: stored as it is, or as 4-bit codes ``[out / 2, in]``, scale and zero point
    ``[out / g, in]``."""
    if len(parts) == 1:
        return parts[0].float()
    codes, scale, zero_point = parts
    groups = unpack(codes, 4).unflatten(0, (scale.shape[0], -1))
    return dequantize(groups, scale.unsqueeze(1), zero_point.unsqueeze(1)).flatten(0, 1)


def weights(predictor: str, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Weight matrices ``[out, in]`` in float32, and biases, of the flat list a predictor is stored as."""
    kind, bits = parse_predictor(predictor)
    size = 1 if bits == 16 else 3
    stored = MATRICES[kind] * size
    return [matrix(tensors[i : i + size]) for i in range(0, stored, size)], [b.float() for b in tensors[stored:]]


def stored_shapes(predictor: str, inputs: int, outputs: int, rank: int | None) -> list[tuple[bool, tuple[int, ...]]]:
    """Of each tensor that a predictor is stored as, whether it holds codes, uint8, and its shape."""
    kind, bits = parse_predictor(predictor)
    hidden = 2 * inputs if kind == "mlp" else min(rank or outputs // 2, outputs)
    matrices = [(outputs, inputs)] if kind == "linear" else [(hidden, inputs), (outputs, hidden)]
    stored = []
    for rows, columns in matrices:
        if bits == 4:
            groups = (False, (rows // math.gcd(rows, GROUP), columns))
            stored += [(True, (byte_rows(rows, 4), columns)), groups, groups]
        else:
            stored.append((False, (rows, columns)))
    return [*stored, *[(False, (size,)) for size in ((hidden, outputs) if kind == "mlp" else (outputs,))]]


def run(kind: str, x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """A predictor of `MATRICES` on float32 rows ``[..., in]``: ``[..., out]``.

    linear: ``x A^T + b``. low-rank: ``x A^T B^T + b``. mlp: ``gelu(norm(x) A^T + a) B^T + b``.
    """
    if kind == "linear":
        return F.linear(x, matrices[0], biases[0])
    if kind == "low-rank":
        return F.linear(F.linear(x, matrices[0]), matrices[1], biases[0])
    hidden = F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), matrices[0], biases[0]))
    return F.linear(hidden, matrices[1], biases[1])


def page_rows(references: Sequence[Tensor], page_size: int) -> Tensor:
    """References ``[B, H, T, D]`` side by side, a page at a time: ``[B * T / P, P, in]`` float32."""
    rows = torch.cat([reference.transpose(1, 2).flatten(2) for reference in references], -1).float()
    pages: Tensor = rows.unflatten(1, (-1, page_size))
    return pages.flatten(0, 1)


def predict(predictor: str, tensors: Sequence[Tensor], references: Sequence[Tensor], page_size: int) -> Tensor:
    """The prediction for whole pages: ``[B, H, T, D]`` float32.

    tensors: what `weights` takes.
    references: the reconstructions ``[B, H, T, D]`` it looks at, those of the layer below first.

    Pages are multiplied one by one, by products of one shape, so that a page has the same prediction when it is
    quantized and whenever it is dequantized.
    """
    out = run(parse_predictor(predictor)[0], page_rows(references, page_size), *weights(predictor, tensors))
    batch, heads = references[0].shape[:2]
    return out.view(batch, -1, heads, out.shape[-1] // heads).transpose(1, 2)
