"""Ablation of `waterfill-static`: python benchmarks/static_ablation.py [--text FILE,...] [--tokens N] [row ...]

The statistics of the calibration texts are gathered once; every row turns them, or a part of them, into another
calibration. Rows are scored as `benchmarks/waterfill.py` does.
"""

import copy
from collections.abc import Callable, Mapping
from unittest.mock import patch

import torch
from waterfill import main, merged, statistics_of

from kvpass import schemes
from kvpass.calibration import water_filling
from kvpass.calibration.water_filling import share_out
from kvpass.codec.shares import water_fill
from kvpass.schemes.calibrated import Calibration, describe

Statistics = Mapping[int, water_filling.Statistics]


def divided(costs: list[torch.Tensor], bits: float) -> list[torch.Tensor]:
    """One water-filling over ``costs``, with ``bits`` bits per coordinate."""
    flat = torch.cat([cost.flatten() for cost in costs])
    found = water_fill(flat, round(bits * len(flat)))
    return [part.view(cost.shape) for part, cost in zip(found.split([c.numel() for c in costs]), costs, strict=True)]


def equal_bits(per: str):
    """In place of one water-filling over the model: the same number of bits for each layer, for the keys and the values
    of each layer, or for each of their heads."""

    def fill(axes, layers, config):
        worth = torch.tensor([water_filling._RICH_WORTH**0.5, water_filling._RICH_WORTH**-0.5]).double()
        found = {}
        for layer, both in axes.items():
            costs = [one.cost.unsqueeze(1) * worth.view(1, -1, 1) for one in both]
            if per == "layer":
                found[layer] = tuple(divided(costs, config.bits))
            elif per == "role":
                found[layer] = tuple(divided([cost], config.bits)[0] for cost in costs)
            else:
                found[layer] = tuple(torch.stack([divided([h], config.bits)[0] for h in cost]) for cost in costs)
        steps = {layer: tuple(torch.ones(each.shape) for each in both) for layer, both in found.items()}
        return found, steps  # nothing here is entropy coded, so steps do not matter

    return fill


def by_queries(statistics: Statistics) -> Statistics:
    """Errors cost what the calibration's queries see of them, in units of each layer's Fisher information; errors in
    values cost the same in all channels."""
    changed = copy.deepcopy(dict(statistics))
    for own in changed.values():
        queries = torch.cat(own.queries, 1).double()
        sizes = own.fisher.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        seen = queries.mT @ queries
        seen = seen / seen.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        own.fisher = torch.stack([seen, torch.eye(seen.shape[-1]).double().expand_as(seen)]) * sizes
    return changed


def without_mean(statistics: Statistics) -> Statistics:
    changed = copy.deepcopy(dict(statistics))
    for own in changed.values():
        own.mean.zero_()
    return changed


def same(statistics: Statistics) -> Statistics:
    return statistics


# name -> pattern of the texts, number of sequences per text, change of the statistics, water-filling, fields
ROWS: dict[str, tuple[str, int, Callable, str, dict]] = {
    "static": ("", 4, same, "", {}),
    "equal bits for each layer": ("", 4, same, "layer", {}),
    "equal bits for keys and values of each layer": ("", 4, same, "role", {}),
    "equal bits for each head": ("", 4, same, "head", {}),
    "costs by queries": ("", 4, by_queries, "", {}),
    "all tokens alike": ("", 4, same, "", dict(ranked=False)),
    "full basis": ("", 4, same, "", dict(block_size=1 << 16)),
    "blocks of 8": ("", 4, same, "", dict(block_size=8)),
    "mean not subtracted": ("", 4, without_mean, "", {}),
    "no repeated texts": ("plain", 4, same, "", {}),
    "one sequence per text": ("", 1, same, "", {}),
    "two sequences per text": ("", 2, same, "", {}),
    "code alone": ("modules", 4, same, "", {}),
    "manual alone": ("manual", 4, same, "", {}),
    "descriptions alone": ("readme", 4, same, "", {}),
}


def calibrated(model, tokenizer, rows) -> dict[str, Calibration]:
    if unknown := rows.keys() - ROWS.keys():
        raise SystemExit(f"unknown rows {', '.join(sorted(unknown))}: choose from {', '.join(ROWS)}")
    parts, found = statistics_of(model, tokenizer), {}
    described = describe(model, {index: own.layer for index, own in parts[0].statistics.items()})
    for name, row in rows.items():
        text, count, change, per, fields = row
        chosen = [
            part
            for part in parts
            if part.index < count and (part.text == text or text in ("", "plain")) and not (text and part.repeated)
        ]
        config = schemes.get("waterfill-static", **fields)
        with patch.object(water_filling, "_water_fill", equal_bits(per) if per else water_filling._water_fill):
            config, tensors = share_out(change(merged(chosen)), config)
        found[name] = Calibration(config, tensors, described, {}, {})
    return found


if __name__ == "__main__":
    main(ROWS, __doc__, calibrated)
