"""E8P, the lattice codebook of QuIP# (arXiv 2402.04396, section 4.2): 16 bits for eight values. Assigns vectors to
points, and computes points from codes.

Magnitudes are half-odd; the codebook has the 256 vectors of smallest norm. The signed sum of a vector is even, which
determines the last sign. The bits of a code are, lowest first: the index of the magnitudes, the other signs, and a
shift of all values by 1/4 or -1/4. QuIP# lists 29 of the 224 vectors of squared norm 12; here they are the first 29 in
order.
"""

import itertools
from functools import cache

import torch
from torch import Tensor

DIM = 8
"""Values that a code stands for."""
UNIT = 1.03
"""Standard deviation, in units of the lattice, of the normal variable that is quantized with least squared error."""
SHIFT = 0.25
_BITS = 8  # of a code, that select the magnitudes
_CHUNK = 1 << 13  # vectors compared with all magnitudes at a time


@cache
def magnitudes(device: torch.device | None = None) -> Tensor:
    """The vectors of magnitudes, smallest first, ``[256, 8]`` float32."""
    vectors = torch.tensor(list(itertools.product((0.5, 1.5, 2.5), repeat=DIM)))
    return vectors[vectors.square().sum(-1).argsort(stable=True)[: 2**_BITS]].to(device)


@cache
def words(device: torch.device) -> Tensor:
    """`magnitudes` as words ``[256]`` int32: two bits per value, and above them a bit that says whether the sum is
    odd."""
    table = magnitudes()
    digits = ((table - 0.5).int() << 2 * torch.arange(DIM)).sum(-1)
    return (digits | (table.sum(-1).int() % 2 << 2 * DIM)).int().to(device)


def assign(x: Tensor) -> Tensor:
    """Codes ``[N]`` int64 of the points nearest to vectors ``[N, 8]`` float32, in units of the lattice.

    Sums are taken in the order of the values, as in the C++ kernel.
    """
    table = magnitudes(x.device)
    weight, odd, found = table.square().sum(-1) / 2, table.sum(-1) % 2, []
    sign_bits = torch.tensor([1 << _BITS + i for i in range(DIM - 1)], device=x.device)
    for chunk in x.split(_CHUNK):
        error, code = torch.full_like(chunk[:, 0], torch.inf), chunk.new_zeros(len(chunk), dtype=torch.int64)
        for shift in (-SHIFT, SHIFT):
            size, negative = (chunk - shift).abs(), chunk < shift
            energy, closeness, least = torch.zeros_like(error), -weight, torch.full_like(error[:, None], torch.inf)
            for i in range(DIM):
                product = size[:, i : i + 1] * table[:, i]
                energy, closeness, least = energy + size[:, i].square(), closeness + product, least.minimum(product)
            wrong = (negative.sum(-1, keepdim=True) % 2) != odd  # one sign has to flip: the cheapest one
            best, which = (closeness - 2 * torch.where(wrong, least, 0.0)).max(-1)
            turned = (size * table[which]).argmin(-1, keepdim=True)
            flip = torch.zeros_like(negative).scatter(-1, turned, wrong.gather(1, which[:, None]))
            better = (own := energy - 2 * best) < error
            mine = which + ((negative ^ flip)[:, :-1] * sign_bits).sum(-1) + ((shift > 0) << _BITS + DIM - 1)
            error, code = torch.where(better, own, error), torch.where(better, mine, code)
        found.append(code)
    return torch.cat(found)


def points(code: Tensor, table: Tensor) -> Tensor:
    """Points of codes, the inverse of `assign`: ``[...]`` int32 -> ``[..., 8]`` float32. table: `words`."""
    word, signs = table[code & 2**_BITS - 1], code >> _BITS & 2 ** (DIM - 1) - 1
    odd = signs ^ (signs >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1) ^ (word >> 2 * DIM)) & 1
    signs = (signs | (odd << DIM - 1)).unsqueeze(-1)
    i = torch.arange(DIM, device=code.device, dtype=torch.int32)
    found: Tensor = ((word.unsqueeze(-1) >> 2 * i & 3).float() + 0.5) * (1 - 2 * (signs >> i & 1)).float()
    return found + torch.where(code >> _BITS + DIM - 1 > 0, SHIFT, -SHIFT).unsqueeze(-1)
