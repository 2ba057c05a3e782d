"""The E8 lattice as a codebook of 2 bits a value (E8P of QuIP#, arXiv 2402.04396, section 4.2): eight values take 16
bits. 8 of them choose magnitudes, 7 their signs, and one a shift of all by 1/4 or -1/4.

Magnitudes are half-odd, the 256 smallest vectors of them; their sum with signs is even, from which the eighth sign
follows. QuIP# lists 29 of the 224 vectors of squared norm 12; here they are the first in order.
"""

import itertools
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import params_dtype
from .codebook import fit_rms
from .hadamard import hadamard, inverse_hadamard
from .kept import CODECS, Codec, Kept
from .spec import CodecSpec

DIM = 8
UNIT = 1.03
"""Size of a normal variable, in units of the lattice, that it codes with least squared error."""
_CHUNK = 1 << 13  # vectors compared with all magnitudes at a time


@cache
def magnitudes(device: torch.device | None = None) -> Tensor:
    """The 256 vectors of magnitudes, smallest first, ``[256, 8]`` float32."""
    vectors = torch.tensor(list(itertools.product((0.5, 1.5, 2.5), repeat=DIM)))
    return vectors[vectors.square().sum(-1).argsort(stable=True)[:256]].to(device)


def _signed(absolute: Tensor, signs: Tensor) -> Tensor:
    """Magnitudes with the signs of 7 bits ``[...]``, the eighth such that their sum is even."""
    bits = (signs.unsqueeze(-1).int() >> torch.arange(DIM - 1, device=signs.device)) & 1
    last = (absolute.sum(-1) + bits.sum(-1)) % 2
    return absolute * (1 - 2 * torch.cat([bits, last.unsqueeze(-1).int()], -1))


def assign(x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest points to vectors ``[N, 8]`` float32 in units of the lattice: magnitudes, and signs with the shift as
    their highest bit, ``[N]`` uint8 each."""
    table, found = magnitudes(x.device), []
    odd = table.sum(-1) % 2
    weights = torch.tensor([1 << i for i in range(DIM - 1)], device=x.device)
    for chunk in x.split(_CHUNK):
        options = []
        for shift in (-0.25, 0.25):
            size, negative = (chunk - shift).abs(), chunk < shift
            products = size.unsqueeze(1) * table
            wrong = (negative.sum(-1, keepdim=True) % 2) != odd  # one sign is the other's, where that costs least
            closeness = products.sum(-1) - table.square().sum(-1) / 2 - 2 * torch.where(wrong, products.amin(-1), 0.0)
            best, which = closeness.max(-1)
            turned = products.gather(1, which[:, None, None].expand(-1, 1, DIM)).squeeze(1).argmin(-1, keepdim=True)
            flip = torch.zeros_like(negative).scatter(-1, turned, wrong.gather(1, which[:, None]))
            error = size.square().sum(-1) - 2 * best
            options.append((error, which, ((negative ^ flip)[:, :-1] * weights).sum(-1) + 128 * (shift > 0)))
        lower, upper = options
        better = upper[0] < lower[0]
        found.append([torch.where(better, *pair) for pair in zip(upper[1:], lower[1:], strict=True)])
    which, signs = (torch.cat(parts).to(torch.uint8) for parts in zip(*found, strict=True))
    return which, signs


def points(which: Tensor, signs: Tensor) -> Tensor:
    """Inverse of `assign`: codes ``[...]`` -> ``[..., 8]`` float32."""
    shift = torch.where(signs > 127, 0.25, -0.25).unsqueeze(-1)
    return _signed(magnitudes(which.device)[which.int()], signs & 127) + shift


def encode(x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor], stored: None = None) -> tuple[Tensor, Tensor]:
    """What is kept of whole pages ``[B, H, N * P, D]``: codes ``[B, H, N, P, D / 4]`` uint8, and scales of groups
    ``[B, H, N, P, D / group_size]``, 16 bits."""
    pages = hadamard(x.float().unflatten(2, (-1, spec.page_size)), spec.transform.rotation)
    groups = pages.unflatten(-1, (-1, spec.quantizer.group_size))
    scale = fit_rms(groups, params_dtype(x.dtype))
    units = UNIT * groups / torch.where(scale > 0, scale, 1).float()
    codes = assign(units.reshape(-1, DIM))
    return torch.cat([part.view(*pages.shape[:-1], -1) for part in codes], -1), scale.squeeze(-1)


def decode(codes: Tensor, scale: Tensor, spec: CodecSpec) -> Tensor:
    """Inverse of `encode` up to rounding: ``[B, H, N * P, D]`` float32."""
    units = points(*codes.chunk(2, -1)).flatten(-2).unflatten(-1, (-1, spec.quantizer.group_size))
    tokens = (units * (scale.float() / UNIT).unsqueeze(-1)).flatten(-2).flatten(2, 3)
    return inverse_hadamard(tokens, spec.transform.rotation)


def _check(spec: CodecSpec) -> None:
    quantizer = spec.quantizer
    if quantizer.bits != 2 or quantizer.per != "token" or quantizer.group_size % DIM:
        raise KVPassError(
            f"The E8 lattice codes {DIM} channels of a token in 2 bits each; this is bits={quantizer.bits}, "
            f"per={quantizer.per!r}, group_size={quantizer.group_size}."
        )


CODECS["e8"] = Codec(
    {
        "codes": Kept(lambda spec, head_dim: (spec.page_size, 2 * head_dim // DIM), torch.uint8),
        "scale": Kept(lambda spec, head_dim: (spec.page_size, head_dim // spec.quantizer.group_size)),
    },
    encode,
    decode,
    check=_check,
)
