"""Predicts a layer's tokens from the dequantized tokens of layers below (AQUA-KV, arXiv 2501.19392).

Predictions are subtracted before quantization and added after dequantization, so only the part that the layers below
do not predict is quantized. All KV heads of a layer are predicted together, from ``[T, H * D]``.
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

MATRICES = {"bias": 0, "linear": 1, "low-rank": 2, "mlp": 2}
"""Number of weight matrices of each kind of predictor."""
OF_FOUR_BITS = ("linear", "low-rank")
"""Kinds of predictors that are also available with 4-bit weights."""
PREDICTORS = (*MATRICES, *(f"{kind}-4" for kind in OF_FOUR_BITS))
GROUP = 64
"""Number of outputs that share a scale in 4-bit weights."""


@cache
def parse_predictor(text: str) -> tuple[str, int]:
    """Kind of predictor and bit width of its weights: "linear-4" is a linear map with 4-bit weights.

    Raises `KVPassError` for an unknown predictor.
    """
    if text not in PREDICTORS:
        raise KVPassError(f"There is no predictor {text!r}; choose one of {', '.join(PREDICTORS)}.")
    return (text.removesuffix("-4"), 4) if text.endswith("-4") else (text, 16)


def matrix(parts: Sequence[Tensor]) -> Tensor:
    """A weight matrix ``[out, in]`` float32 from its stored ``parts``: the matrix itself, or 4-bit codes
    ``[out / 2, in]``, scale and zero point ``[out / g, in]``."""
    if len(parts) == 1:
        return parts[0].float()
    codes, scale, zero_point = parts
    groups = unpack(codes, 4).unflatten(0, (scale.shape[0], -1))
    return dequantize(groups, scale.unsqueeze(1), zero_point.unsqueeze(1)).flatten(0, 1)


def weights(predictor: str, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Weight matrices ``[out, in]`` and biases, float32, from the flat list of tensors of a stored predictor."""
    kind, bits = parse_predictor(predictor)
    size = 1 if bits == 16 else 3
    stored = MATRICES[kind] * size
    return [matrix(tensors[i : i + size]) for i in range(0, stored, size)], [b.float() for b in tensors[stored:]]


def stored_shapes(predictor: str, inputs: int, outputs: int, rank: int | None) -> list[tuple[bool, tuple[int, ...]]]:
    """For each tensor of a stored predictor: whether it holds uint8 codes, and its shape."""
    kind, bits = parse_predictor(predictor)
    hidden = 2 * inputs if kind == "mlp" else min(rank or outputs // 2, outputs)
    matrices = [(outputs, inputs)] if kind == "linear" else [(hidden, inputs), (outputs, hidden)]
    matrices = matrices[: MATRICES[kind]]
    stored = []
    for rows, columns in matrices:
        if bits == 4:
            groups = (False, (rows // math.gcd(rows, GROUP), columns))
            stored += [(True, (byte_rows(rows, 4), columns)), groups, groups]
        else:
            stored.append((False, (rows, columns)))
    return [*stored, *[(False, (size,)) for size in ((hidden, outputs) if kind == "mlp" else (outputs,))]]


def run(kind: str, x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Apply a predictor of `MATRICES` to float32 rows ``[..., in]``: ``[..., out]``.

    bias: ``b``. linear: ``x A^T + b``. low-rank: ``x A^T B^T + b``. mlp: ``gelu(norm(x) A^T + a) B^T + b``.
    """
    if kind == "bias":
        return biases[0].expand(*x.shape[:-1], -1)
    if kind == "linear":
        return F.linear(x, matrices[0], biases[0])
    if kind == "low-rank":
        return F.linear(F.linear(x, matrices[0]), matrices[1], biases[0])
    hidden = F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), matrices[0], biases[0]))
    return F.linear(hidden, matrices[1], biases[1])


def with_below(x: Tensor, below: Tensor | None, layers: int) -> Tensor:
    """A layer's tokens ``x`` ``[B, H, T, D]`` and those of the layers ``below`` it, nearest first and side by side as
    heads: ``[B, layers * H, T, D]``. Where there is no layer below, they are zeros.

    below: the result for the layer below; None for the first layer.
    """
    if layers == 1:
        return x
    heads = x.shape[1]
    if below is None:
        return F.pad(x, (0, 0, 0, 0, 0, (layers - 1) * heads))
    return torch.cat((x, below[:, :-heads]), 1)


def page_rows(references: Sequence[Tensor], page_size: int) -> Tensor:
    """Concatenate references ``[B, H, T, D]`` along channels, by page: ``[B * T / P, P, in]`` float32."""
    rows = torch.cat([reference.transpose(1, 2).flatten(2) for reference in references], -1).float()
    pages: Tensor = rows.unflatten(1, (-1, page_size))
    return pages.flatten(0, 1)


def predict(predictor: str, tensors: Sequence[Tensor], references: Sequence[Tensor], page_size: int) -> Tensor:
    """Predict whole pages: ``[B, H, T, D]`` float32.

    tensors: the stored predictor, as `weights` takes it.
    references: the dequantized tokens to predict from: those of the layers below, as `with_below` makes them, and for
        values those of this layer's keys.

    Each page is a matrix product of the same shape. So the prediction for a page is the same in quantization and in
    every dequantization.
    """
    out = run(parse_predictor(predictor)[0], page_rows(references, page_size), *weights(predictor, tensors))
    batch, _, _, head_dim = references[0].shape
    return out.view(batch, -1, out.shape[-1] // head_dim, head_dim).transpose(1, 2)
