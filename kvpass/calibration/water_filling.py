"""`waterfill` calibrated once: water-fill bits over the keys and values of all heads of a model.

Bits go where errors cost the model's predictions most. All caches of the model then share the basis, means, bit widths
and queries. Each text is run once forwards and once backwards. Memory does not depend on their number: only the mean,
second moments and Fisher information of each head are kept, before rotary embedding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..cache.sliding import plan_for
from ..codec.entropy_coding import rescale
from ..codec.layer_pages import share_of
from ..codec.probes import QUERIES
from ..codec.rope import rotate, split_pairs
from ..codec.shares import Shares, water_fill
from ..codec.tensors import of_model
from ..codec.transform_coding import WIDEST
from ..models.arguments import filling
from ..models.probe import fresh_cache
from ..schemes import CalibratedWaterfillConfig, LayerGeometry, LayerPlan
from ..schemes.waterfill import share_of_tokens
from .sensitivity import Seen, look

_REPEATED = 0.5  # share of the Fisher information that comes from texts with a repeated half
ONE_IN = 3  # one in this many texts is also read with its first half repeated
_FLOOR = 0.02  # lower bound of a channel's cost, relative to the mean
_LEAST_VARIANCE = 1e-6  # relative to a head's mean; keeps a 16-bit basis well conditioned
_RICH_WORTH = 6.0  # cost of an error in a rich token, relative to other tokens
_TEMPER = 0.85  # exponent on measured head costs: few texts overestimate the largest
_SHIFTS = 1, 16, 256  # position offsets from which the rotation of keys is found
_TOLERANCE, _LEAST_ANGLE = 0.05, 1e-6  # relative error of a rotation; smallest angle
_STEPS = 2.0**-8, 2.0**8  # smallest and largest step, in standard deviations
_DISTANCES = 112, 4096  # range of distances from a key to the queries that rank it

Fitted = tuple[list[Tensor], list[Tensor]]


class Turn:
    """How a position rotates the keys of a layer: ``rope`` names the pairing (`kvpass.codec.rope`), ``angles`` ``[p]``
    are per position."""

    def __init__(self, rope: str, angles: Tensor):
        self.rope, self.angles = rope, angles

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` ``[H, T, D]`` rotated by ``positions`` ``[T]``, which may be negative; float32."""
        if not self.rope:
            return x.float()
        turned = positions.double().unsqueeze(-1) * self.angles.to(positions.device).double()
        cos, sin = turned.cos()[None].float(), turned.sin()[None].float()
        return rotate(x.float()[None], cos, sin, self.rope)[0]

    def is_close(self, other: Turn) -> bool:
        """Whether two layers rotate keys by the same angles."""
        return self.rope == other.rope and torch.allclose(self.angles, other.angles, rtol=1e-3, atol=1e-6)

    def matrices(self, positions: Tensor, size: int) -> Tensor:
        """The rotations as matrices to multiply rows with, ``[T, D, D]`` float64."""
        identity = torch.eye(size, device=positions.device)
        rows = [self(identity[i].expand(1, len(positions), -1), positions)[0] for i in range(size)]
        return torch.stack(rows, 1).double()


@torch.no_grad()
def find_turns(model: nn.Module, layers: dict[int, LayerGeometry], ids: Tensor) -> dict[int, Turn]:
    """How each of ``layers`` rotates its keys, found by running a few tokens ``[1, T]`` at shifted positions. If
    attention depends on distances alone, nothing else changes. Keys that are not rotated in pairs of channels are left
    as they are."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {index: _NO_TURN for index in layers}
    keys: dict[int, dict[int, Tensor]] = {}
    for shift in (0, *_SHIFTS):
        cache: Any = fresh_cache(model)
        positions = torch.arange(ids.shape[1], device=ids.device)[None] + shift
        model(input_ids=ids, position_ids=positions, **filling(model, cache, 1))
        keys[shift] = {index: cache.layers[index].keys[0].float() for index in layers}
    turns: list[Turn] = []
    found: dict[int, Turn] = {}
    for index in layers:
        own = _turn({shift: each[index] for shift, each in keys.items()})
        found[index] = same = next((turn for turn in turns if turn.is_close(own)), own)
        if same is own:
            turns.append(own)
    return found


def _turn(keys: dict[int, Tensor]) -> Turn:
    """The rotation of keys ``[H, T, D]``, which are given for several position shifts, including 0."""
    keys = {shift: each.double() for shift, each in keys.items()}
    pairings = [f"{kind}-{pairs}" for pairs in range(1, keys[0].shape[-1] // 2 + 1) for kind in ("half", "interleaved")]
    best, least = _NO_TURN, _TOLERANCE**2 * float(keys[0].square().sum())
    for rope in pairings:  # slow channels hardly turn over small shifts, so larger ones tell pairings apart
        found: dict[int, tuple[Tensor, float]] = {}
        for shift in reversed(_SHIFTS):
            found[shift] = _between(keys[0], keys[shift], rope)
            if found[shift][1] >= least:
                break
        else:
            angle = found[_SHIFTS[0]][0]
            for shift in _SHIFTS[1:]:  # larger shifts give more precise angles
                more = torch.remainder(found[shift][0] - shift * angle + torch.pi, 2 * torch.pi) - torch.pi
                angle = angle + more / shift
            if (angle.abs() > _LEAST_ANGLE).any():
                best, least = Turn(rope, angle.float().cpu()), found[_SHIFTS[-1]][1]
    return best


def _between(before: Tensor, after: Tensor, rope: str) -> tuple[Tensor, float]:
    """The angles ``[p]`` by which ``rope`` turns ``before`` into ``after`` most closely, both ``[H, T, D]``, and the
    squared error; float64."""
    first, second, rest = split_pairs(torch.stack([before, after]), rope)
    was, became = torch.complex(first, second)
    angle = (became * was.conj()).sum((0, 1)).angle()
    error = (became - was * torch.polar(torch.ones_like(angle), angle)).abs().square().sum()
    return angle, float(error + (rest[1] - rest[0]).square().sum())


_NO_TURN = Turn("", torch.empty(0))


class Statistics:
    """One layer's statistics over all texts: keys before rotary embedding, values, queries, and what errors cost."""

    def __init__(self, layer: LayerGeometry, turn: Turn):
        self.layer, self.turn, self.tokens = layer, turn, 0
        heads, size = layer.num_key_value_heads, layer.head_dim
        self.mean = torch.zeros(heads, 1, size, dtype=torch.float64)
        self.moments = torch.zeros(2, heads, size, size, dtype=torch.float64)  # keys, values
        self.fisher = torch.zeros(2, 2, heads, size, size, dtype=torch.float64)  # plain texts, repeated ones
        self.queries: list[Tensor] = []

    def add(self, seen: Seen, sinks: int, far: int, repeated: bool, generator: torch.Generator) -> None:
        """Add the statistics of one text."""
        positions = torch.arange(seen.k.shape[1], device=seen.k.device)
        counted, last = slice(sinks, len(positions) - far), len(positions) - far
        for role, gradient in enumerate((seen.of_keys, seen.of_values)):
            back = self.turn(gradient, -positions) if role == 0 else gradient.float()
            own = back[:, counted].double().cpu()
            self.fisher[int(repeated), role] += own.mT @ own / max(1, last - sinks)
        if repeated:
            return
        keys, values = self.turn(seen.k, -positions), seen.v.float()
        keys, values = (x[:, sinks:].double().cpu() for x in (keys, values))
        self.tokens += keys.shape[1]
        self.mean += keys.sum(1, keepdim=True)
        self.moments += torch.stack([keys.mT @ keys, values.mT @ values])
        self.queries.append(self._some_queries(seen.q, positions, generator))

    def _some_queries(self, q: Tensor, positions: Tensor, generator: torch.Generator) -> Tensor:
        """Random queries of ``q`` ``[H_q, T, D]``, as keys at a random distance before them see them: ``[H, Q, D]``."""
        first, last = len(positions) // 16, len(positions)
        at = torch.randint(first, last, (QUERIES,), generator=generator).to(q.device)
        away = torch.randint(*_DISTANCES, (QUERIES,), generator=generator).to(q.device)
        chosen = self.turn(q[:, at], away - positions[at]).unflatten(0, (self.layer.num_key_value_heads, -1))
        of_head = torch.randint(0, chosen.shape[1], (QUERIES,), generator=generator).to(q.device)
        return chosen[:, of_head, torch.arange(QUERIES, device=q.device)].cpu()

    def merge(self, other: Statistics) -> None:
        """Add the statistics of other texts."""
        self.tokens += other.tokens
        self.mean, self.moments = self.mean + other.mean, self.moments + other.moments
        self.fisher, self.queries = self.fisher + other.fisher, self.queries + other.queries

    def costs(self, scale: Tensor) -> Tensor:
        """Fisher information of keys and of values, ``[2, H, D, D]``. Plain and repeated texts are first normalized by
        their totals over the whole model, ``scale`` ``[2]``. Without repeated texts, plain ones count alone."""
        weights = torch.tensor([1 - _REPEATED, _REPEATED]) if scale[1] > 0 else torch.tensor([1.0, 0.0])
        return (self.fisher * (weights / scale.clamp_min(1e-300)).view(2, 1, 1, 1, 1)).sum(0)

    def covariances(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of keys ``[H, 1, D]``, and covariances of page-relative keys and of values, ``[2, H, D, D]``."""
        mean = self.mean / self.tokens
        keys, values = self.moments / self.tokens
        return mean, torch.stack([self.in_page_rope(keys - mean.mT @ mean, offsets), values])

    def in_page_rope(self, matrix: Tensor, offsets: Tensor) -> Tensor:
        """Second moments ``[H, D, D]`` of page-relative keys, from those of keys before rotary embedding."""
        if not self.turn.rope:
            return matrix
        turned = self.turn.matrices(offsets, matrix.shape[-1]).unsqueeze(1)
        return (turned.mT @ matrix @ turned).mean(0)


def measure(
    model: nn.Module,
    data: Sequence[Tensor],
    layers: dict[int, LayerGeometry],
    turns: dict[int, Turn],
    config: CalibratedWaterfillConfig,
    seen: tqdm,
) -> dict[int, Statistics]:
    """The statistics of each layer of ``model`` over ``data``, ``[1, T]`` each; some texts are also read with their
    first half repeated."""
    generator = torch.Generator().manual_seed(0)
    statistics = {index: Statistics(layer, turns[index]) for index, layer in layers.items()}
    repeated = [repeating(ids) for ids in data[::ONE_IN]]
    for is_repeated, texts in enumerate((data, repeated)):
        for ids in texts:
            add_text(statistics, model, ids, config, bool(is_repeated), generator)
            seen.update()
    return statistics


def repeating(ids: Tensor) -> Tensor:
    """The first half of a text ``[1, T]``, twice."""
    return ids[:, : ids.shape[1] // 2].repeat(1, 2)


def add_text(
    statistics: dict[int, Statistics],
    model: nn.Module,
    ids: Tensor,
    config: CalibratedWaterfillConfig,
    repeated: bool,
    generator: torch.Generator,
) -> None:
    """Run ``model`` over a text ``[1, T]`` and add what its layers see; ``repeated``: whether it is `repeating`."""
    layers, sinks = {index: own.layer for index, own in statistics.items()}, config._policy().sinks
    far = {index: _distance_when_packed(config, layer) for index, layer in layers.items()}
    for index, found in look(model, ids, layers, far, sinks, generator).items():
        statistics[index].add(found, sinks, far[index], repeated, generator)


def _distance_when_packed(config: CalibratedWaterfillConfig, layer: LayerGeometry) -> int:
    """How many tokens behind the newest a page's middle token is when the page is packed."""
    plan = plan_for(config, layer)
    assert isinstance(plan, LayerPlan), "only layers that are packed are calibrated"
    retention = plan.key.retention
    return retention.window - retention.page_size // 2


def passes(texts: int) -> int:
    """How many texts `measure` reads, given ``texts`` of them."""
    return texts + len(range(0, texts, ONE_IN))


class _Axes:
    """A block-diagonal basis for heads with ``covariance`` ``[H, D, D]`` whose errors cost ``fisher`` ``[H, D, D]``.

    basis: ``[H, D, b]``: row i is what a step of 1 in coordinate i adds to the channels of its block.
    cost: ``[H, D]``: what an error as large as the coordinate itself costs, comparable over the whole model.
    """

    def __init__(self, covariance: Tensor, fisher: Tensor, size: int):
        def diagonal_blocks(matrix: Tensor) -> Tensor:
            blocks = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
            return blocks.diagonal(dim1=-4, dim2=-2).permute(0, 3, 1, 2)

        def with_diagonal(matrix: Tensor, least: Tensor) -> Tensor:
            return matrix + torch.diag_embed(least[:, None, None].expand(matrix.shape[:-1]))

        each = fisher.diagonal(dim1=-2, dim2=-1).mean(-1)
        variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
        covariance = with_diagonal(diagonal_blocks(covariance), _LEAST_VARIANCE * (variance + 1))
        self.metric = diagonal_blocks(fisher) / each.clamp_min(1e-300)[:, None, None, None]
        metric = with_diagonal(self.metric, torch.full_like(each, _FLOOR))
        energy, directions = torch.linalg.eigh(metric)
        root = energy.clamp_min(_FLOOR / 2).sqrt().unsqueeze(-2)
        half, inverse = (directions * root) @ directions.mT, (directions / root) @ directions.mT
        cost, vectors = torch.linalg.eigh(half @ covariance @ half)
        cost = cost.clamp_min(1e-12 * variance[:, None, None] + 1e-12)
        self.basis = (cost.sqrt().unsqueeze(-1) * (vectors.mT @ inverse)).flatten(1, 2)
        self.metric = self.metric.flatten(1, 2)
        self.cost = cost.flatten(1) * each.unsqueeze(-1)


def share_out(
    statistics: dict[int, Statistics], config: CalibratedWaterfillConfig
) -> tuple[CalibratedWaterfillConfig, dict[int, Fitted]]:
    """``config`` completed with the rotation of keys, and for each layer the tensors that all caches of the model
    share: `kvpass.codec.tensors.of_model` for keys and values, and before those of keys the rotation angles, if keys
    are rotated."""
    size = config._policy().page_size
    offsets = torch.arange(size) - size // 2
    traces = [own.fisher.diagonal(dim1=-2, dim2=-1).sum((1, 2, 3)) for own in statistics.values()]
    scale = torch.stack(traces).sum(0)
    ropes = tuple(statistics[i].turn.rope if i in statistics else "" for i in range(max(statistics) + 1))
    config = replace(config, ropes=ropes)
    axes: dict[int, tuple[_Axes, _Axes]] = {}
    means: dict[int, Tensor] = {}
    for index, own in statistics.items():
        shares = Shares.of(config.plan(own.layer).key)
        means[index], covariances = own.covariances(offsets)
        costs = own.costs(scale)
        costs[0] = own.in_page_rope(costs[0], offsets)
        keys, values = zip(covariances, costs, strict=True)
        axes[index] = _Axes(*keys, shares.block_size), _Axes(*values, shares.block_size)
    widths, steps = _water_fill(axes, {index: own.layer for index, own in statistics.items()}, config)
    fitted: dict[int, Fitted] = {}
    for index, own in statistics.items():
        plan, both = config.plan(own.layer), []
        sides = zip((plan.key, plan.value), axes[index], widths[index], steps[index], strict=True)
        for spec, of_role, of_widths, of_steps in sides:
            found = {
                "share": share_of(of_widths),
                "metric": of_role.metric[None],
                "center": means[index][None],
                "basis": of_role.basis[None],
                "widths": of_widths[None],
                "steps": of_steps[None],
                "queries": torch.cat(own.queries, 1)[None, :, :: len(own.queries)],
            }
            tensors = [found[name] for name in of_model(spec)]
            both.append([t.to(torch.float16) if t.is_floating_point() else t for t in tensors])
        if own.turn.rope:
            both[0].insert(0, own.turn.angles.cpu().clone())
        fitted[index] = both[0], both[1]
    return config, fitted


def _water_fill(
    axes: dict[int, tuple[_Axes, _Axes]], layers: dict[int, LayerGeometry], config: CalibratedWaterfillConfig
) -> tuple[dict[int, tuple[Tensor, Tensor]], dict[int, tuple[Tensor, Tensor]]]:
    """Bit widths of the keys and values of each layer, ``[H, ranks, D]`` uint8, and step sizes of as many bits if codes
    are entropy coded. A bit of a sliding window takes less memory than one of full attention, in proportion to
    `share_of_tokens`."""
    of_heads = torch.cat([one.cost.sum(-1) for both in axes.values() for one in both])
    mean = of_heads.mean()
    worth = torch.tensor([_RICH_WORTH**0.5, _RICH_WORTH**-0.5] if config.ranked else [1.0], dtype=torch.float64)
    costs, memory = [], []
    for index, both in axes.items():
        for one in both:
            tempered = (one.cost.sum(-1, keepdim=True) / mean) ** (_TEMPER - 1)
            costs.append((one.cost * tempered).unsqueeze(1) * worth.view(1, -1, 1))
            memory.append(torch.full_like(costs[-1], share_of_tokens(layers[index])))
    flat, sizes = (torch.cat([one.flatten() for one in each]) for each in (costs, memory))
    bits = min(config.bits, WIDEST)
    widths = water_fill(flat, round(bits * float(sizes.sum())), sizes)
    steps = rescale((sizes / flat.clamp_min(1e-300)).sqrt(), bits, sizes).clamp(*_STEPS)

    def by_layer(each: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        of_costs = zip(each.split([cost.numel() for cost in costs]), costs, strict=True)
        parts = [part.view(cost.shape) for part, cost in of_costs]
        return dict(zip(axes, zip(parts[::2], parts[1::2], strict=True), strict=True))

    return by_layer(widths), by_layer(steps)
