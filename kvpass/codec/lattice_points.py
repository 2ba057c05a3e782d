"""Lattice codebooks of 2 bits per value: assigns vectors to points, and computes points from codes.

There are two codebooks: E8P of QuIP# (arXiv 2402.04396, section 4.2), with 16 bits for eight values, and the 256 points
of D4 nearest to one of its deep holes, with 8 bits for four values.

Magnitudes are half-odd; the codebook has the vectors of smallest norm. The signed sum of a vector is even, which
determines the last sign. The bits of a code are, lowest first: the index of the magnitudes, the other signs, and, for
E8, a shift of all values by 1/4 or -1/4. QuIP# lists 29 of the 224 vectors of squared norm 12; here they are the first
29 in order. For D4, the 256 points are complete shells.
"""

import itertools
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Lattice(NamedTuple):
    """A codebook of vectors of ``dim`` values.

    bits: number of bits of a code that select the magnitudes.
    unit: standard deviation, in units of the lattice, of the normal variable that is quantized with the least squared
        error.
    shift: shift of all points, in either direction; 0 for none.
    """

    dim: int
    bits: int
    unit: float
    shift: float


LATTICES = {"e8": Lattice(8, 8, 1.03, 0.25), "d4": Lattice(4, 5, 1.22, 0.0)}
_CHUNK = 1 << 13  # vectors compared with all magnitudes at a time


@cache
def magnitudes(lattice: Lattice, device: torch.device | None = None) -> Tensor:
    """The vectors of magnitudes, smallest first, ``[2**bits, dim]`` float32."""
    vectors = torch.tensor(list(itertools.product((0.5, 1.5, 2.5), repeat=lattice.dim)))
    return vectors[vectors.square().sum(-1).argsort(stable=True)[: 2**lattice.bits]].to(device)


@cache
def words(lattice: Lattice, device: torch.device) -> Tensor:
    """`magnitudes` as words ``[2**bits]`` int32: two bits per value, and above them a bit that says whether the sum is
    odd."""
    table = magnitudes(lattice)
    digits = ((table - 0.5).int() << 2 * torch.arange(lattice.dim)).sum(-1)
    return (digits | (table.sum(-1).int() % 2 << 2 * lattice.dim)).int().to(device)


def assign(x: Tensor, lattice: Lattice) -> Tensor:
    """Codes ``[N]`` int64 of the points nearest to vectors ``[N, dim]`` float32, in units of the lattice."""
    table, dim, bits = magnitudes(lattice, x.device), lattice.dim, lattice.bits
    odd, found = table.sum(-1) % 2, []
    weights = torch.tensor([1 << bits + i for i in range(dim - 1)], device=x.device)
    for chunk in x.split(_CHUNK):
        error, code = torch.full_like(chunk[:, 0], torch.inf), chunk.new_zeros(len(chunk), dtype=torch.int64)
        for shift in sorted({-lattice.shift, lattice.shift}):
            size, negative = (chunk - shift).abs(), chunk < shift
            products = size.unsqueeze(1) * table
            wrong = (negative.sum(-1, keepdim=True) % 2) != odd  # one sign has to flip: the cheapest one
            closeness = products.sum(-1) - table.square().sum(-1) / 2 - 2 * torch.where(wrong, products.amin(-1), 0.0)
            best, which = closeness.max(-1)
            turned = products.gather(1, which[:, None, None].expand(-1, 1, dim)).squeeze(1).argmin(-1, keepdim=True)
            flip = torch.zeros_like(negative).scatter(-1, turned, wrong.gather(1, which[:, None]))
            better = (own := size.square().sum(-1) - 2 * best) < error
            mine = which + ((negative ^ flip)[:, :-1] * weights).sum(-1) + ((shift > 0) << bits + dim - 1)
            error, code = torch.where(better, own, error), torch.where(better, mine, code)
        found.append(code)
    return torch.cat(found)


def points(code: Tensor, lattice: Lattice, table: Tensor) -> Tensor:
    """Points of codes, the inverse of `assign`: ``[...]`` int32 -> ``[..., dim]`` float32. table: `words`."""
    dim, bits = lattice.dim, lattice.bits
    word, signs = table[code & 2**bits - 1], code >> bits & 2 ** (dim - 1) - 1
    odd = signs ^ (signs >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1) ^ (word >> 2 * dim)) & 1
    signs = (signs | (odd << dim - 1)).unsqueeze(-1)
    i = torch.arange(dim, device=code.device, dtype=torch.int32)
    found: Tensor = ((word.unsqueeze(-1) >> 2 * i & 3).float() + 0.5) * (1 - 2 * (signs >> i & 1)).float()
    if not lattice.shift:
        return found
    return found + torch.where(code >> bits + dim - 1 > 0, lattice.shift, -lattice.shift).unsqueeze(-1)
