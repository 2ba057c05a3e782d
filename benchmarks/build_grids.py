"""Build the grids of HIGGS: points of least mean squared error for a standard normal vector, by Lloyd's algorithm.

    python benchmarks/build_grids.py            # writes kvpass/codec/codebooks.safetensors, prints the errors

In one dimension, cells are intervals and all integrals have closed forms. In two, a fine lattice of the plane stands
for the distribution; in four, samples do. Each grid is started from several random draws, and the best is kept.
"""

import argparse
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZES = {1: (2, 3, 4, 8, 16), 2: (16, 64, 256), 4: (64, 256)}
OUT = Path(__file__).parent.parent / "kvpass" / "codec" / "codebooks.safetensors"


def one_dimensional(n: int) -> tuple[torch.Tensor, float]:
    """The Lloyd-Max points, to machine precision, and their error."""
    points = torch.linspace(-1.5, 1.5, n, dtype=torch.float64)
    inf = torch.tensor([math.inf], dtype=torch.float64)

    def cells():
        edges = torch.cat([-inf, (points[1:] + points[:-1]) / 2, inf])
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        return torch.special.ndtr(edges).diff(), -density.diff()

    for _ in range(20_000):
        mass, moment = cells()
        points = moment / mass
    mass, moment = cells()
    return points[:, None], float(1 - (moment.square() / mass).sum())


def plane(side: int = 700, reach: float = 5.2) -> tuple[torch.Tensor, torch.Tensor]:
    """A lattice of the plane and the mass of a standard normal at each of its points."""
    axis = torch.linspace(-reach, reach, side)
    points = torch.cartesian_prod(axis, axis)
    mass = torch.exp(-points.square().sum(1) / 2)
    return points, mass / mass.sum()


def lloyd(data: torch.Tensor, mass: torch.Tensor, points: torch.Tensor, rounds: int) -> tuple[torch.Tensor, float]:
    """Centroids after ``rounds`` of assigning and averaging; empty cells move to where the error is largest."""
    dim, half = data.shape[1], mass[:, None]
    for _ in range(rounds):
        sums = torch.zeros(len(points), dim + 2)
        for chunk, weight in zip(data.split(1 << 16), half.split(1 << 16), strict=True):
            distance = torch.addmm(points.square().sum(1), chunk, points.T, alpha=-2)
            least, nearest = distance.min(1)
            error = (least + chunk.square().sum(1)) * weight[:, 0]
            sums.index_add_(0, nearest, torch.cat([chunk * weight, weight, error[:, None]], 1))
        points = torch.where(sums[:, dim : dim + 1] > 0, sums[:, :dim] / sums[:, dim : dim + 1], points)
    return points, float(sums[:, dim + 1].sum()) / dim


def several_dimensional(dim: int, n: int, rounds: int, starts: int, samples: int) -> tuple[torch.Tensor, float]:
    generator, best = torch.Generator().manual_seed(0), None
    data, mass = (
        plane() if dim == 2 else (torch.randn(samples, dim, generator=generator), torch.ones(samples) / samples)
    )
    rough = torch.randperm(len(data), generator=generator)[: 1 << 16]
    for _ in range(starts):
        # spread like the density to the power d / (d + 2), as optimal points are
        points = torch.randn(n, dim, generator=generator) * math.sqrt((dim + 2) / dim)
        points, error = lloyd(data[rough], mass[rough] / mass[rough].sum(), points, rounds)
        if best is None or error < best[1]:
            best = points, error
    return lloyd(data, mass, best[0], rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--samples", type=int, default=1 << 20)
    args = parser.parse_args()
    grids = {}
    for dim, sizes in SIZES.items():
        for n in sizes:
            if dim == 1:
                points, error = one_dimensional(n)
            else:
                points, error = several_dimensional(dim, n, args.rounds, args.starts, args.samples)
            grids[f"d{dim}n{n}"] = points[points[:, 0].argsort()].float().contiguous()
            print(f"d{dim} n{n:<4} {math.log2(n) / dim:.2f} bits  error per dimension {error:.5f}", flush=True)
    save_file(grids, OUT)


if __name__ == "__main__":
    main()
