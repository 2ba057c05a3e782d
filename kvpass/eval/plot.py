"""Plot quality against bits, and figures by layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import KVPassError
from .quality import Quality

FORMATS = (".png", ".svg")
_DIRECTIONS = ((1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1))
_DISTANCES = (6, 12, 20, 30, 42)  # between a label and its point, in typographic points
_NEAR = 8
_SAMPLES = 30  # points along each line at which a label would cover it
_COLORS = 10  # of matplotlib's cycle
_SHOWN = 1e-6  # nats; anything smaller is rounding error, and has no place on a logarithmic axis


@dataclass(frozen=True)
class Point:
    """bits: bits per value; kl: mean divergence in nats; error: half the width of its 95 % interval."""

    name: str
    bits: float
    kl: float
    error: float


def points(rows: Sequence[Quality]) -> list[Point]:
    """One `Point` per row."""
    return [Point(row.scheme, row.bits_per_value, row.kl, row.kl_error) for row in rows]


def check_plot(path: Path) -> None:
    """Raise `KVPassError` unless a picture can be drawn to ``path``. Call it before measuring anything."""
    if path.suffix not in FORMATS:
        raise KVPassError(
            f"{path.name!r} is not a supported image format: use a name ending in {' or '.join(FORMATS)}."
        )
    if find_spec("matplotlib") is None:
        raise KVPassError("Drawing needs matplotlib: pip install 'kvpass[plot]', or leave --plot out.")


def front(rows: Sequence[Point]) -> list[Point]:
    """The Pareto front, sorted by bits: rows that no other row beats in both bits and mean KL."""
    best = float("inf")
    kept: list[Point] = []
    for row in sorted(rows, key=lambda row: (row.bits, row.kl)):
        if row.kl < best:
            best, kept = row.kl, [*kept, row]
    return kept


def pareto(results: Mapping[str, Sequence[Point]], path: Path, title: str) -> None:
    """Plot mean KL with its 95 % interval against bits per value, one panel per text, to an SVG or PNG file.

    Points are labelled, and those on the Pareto front are connected. Rows with a mean KL below 1e-6, such as full
    precision, are left out. Raises `KVPassError` without matplotlib, or if no row is left to draw.
    """
    check_plot(path)
    shown = {text: [row for row in rows if row.kl >= _SHOWN] for text, rows in results.items()}
    if not all(shown.values()):
        raise KVPassError(f"No scheme has a mean KL of at least {_SHOWN}: there is nothing to draw.")
    with _figure(path, 1, len(shown), figsize=(1 + 5.5 * len(shown), 5.5), sharey=True) as (figure, panels):
        for panel, (text, rows) in zip(panels[0], shown.items(), strict=True):
            _draw(panel, rows)
            panel.set(title=text, xlabel="bits per value, everything counted", yscale="log")
        panels[0][0].set_ylabel("mean KL to full precision, nats")
        figure.suptitle(title)
        figure.draw_without_rendering()
        for panel, rows in zip(panels[0], shown.values(), strict=True):
            _label(panel, rows)


@contextmanager
def _figure(path: Path, *panels: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its rows and columns of ``panels``, which is then written to ``path``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    fonts: dict[Any, Any] = {"font.size": 9, "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"]}
    with matplotlib.rc_context({"svg.hashsalt": "kvpass", "svg.fonttype": "none", **fonts}):  # text stays text
        figure, axes = pyplot.subplots(*panels, squeeze=False, layout="constrained", **options)
        yield figure, axes
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _draw(panel: Any, rows: Sequence[Point]) -> None:
    best = front(rows)
    for row in rows:
        color = "C0" if row in best else "0.45"
        panel.errorbar(row.bits, row.kl, [[_below(row)], [row.error]], fmt="o", ms=4, lw=0.8, color=color)
    panel.plot([row.bits for row in best], [row.kl for row in best], "C0--", lw=0.8, zorder=0)
    panel.grid(which="major", lw=0.3)
    panel.margins(x=0.16, y=0.06)


def _label(panel: Any, rows: Sequence[Point]) -> None:
    """Put each name beside its point, where it covers the fewest names, points, intervals and front lines."""
    renderer = panel.figure.canvas.get_renderer()
    covered = _obstacles(panel, rows)
    taken: list[Any] = []
    for row in sorted(rows, key=lambda row: row.kl):
        at, behind = (row.bits, row.kl), dict(boxstyle="square,pad=0.1", fc="white", ec="none", alpha=0.7)
        label = panel.annotate(row.name, at, (0, 0), textcoords="offset points", fontsize=8, va="center", bbox=behind)

        def place(offset: tuple[float, float], label: Any = label) -> Any:
            label.set_ha("left" if offset[0] > 0 else "right" if offset[0] < 0 else "center")
            label.xyann = offset
            return label.get_window_extent(renderer).padded(2)

        def cost(offset: tuple[float, float], place: Callable[..., Any] = place) -> float:
            box = place(offset)
            outside = not (panel.bbox.contains(box.x0, box.y0) and panel.bbox.contains(box.x1, box.y1))
            names = sum(box.overlaps(other) for other in taken)
            return float(
                100 * outside + 10 * names + 0.3 * sum(box.contains(*p) for p in covered) + 0.2 * max(map(abs, offset))
            )

        offset = min(((d * x, d * y) for d in _DISTANCES for x, y in _DIRECTIONS), key=cost)
        taken.append(place(offset))
        if max(map(abs, offset)) > _NEAR:
            panel.annotate("", at, offset, textcoords="offset points", arrowprops=dict(arrowstyle="-", lw=0.4))


def _obstacles(panel: Any, rows: Sequence[Point]) -> list[tuple[float, float]]:
    """Pixel positions of points, intervals and the front; points have the greatest weight."""

    def between(a: tuple[float, float], b: tuple[float, float]) -> list[tuple[float, float]]:
        (x, y), (u, v) = panel.transData.transform([a, b])
        return [(x + (u - x) * i / _SAMPLES, y + (v - y) * i / _SAMPLES) for i in range(_SAMPLES + 1)]

    best = [(row.bits, row.kl) for row in front(rows)]
    lines = [between(*ends) for ends in pairwise(best)]
    lines += [between((row.bits, row.kl - _below(row)), (row.bits, row.kl + row.error)) for row in rows]
    return [p for line in lines for p in line] + 15 * [tuple(panel.transData.transform((r.bits, r.kl))) for r in rows]


def _below(row: Point) -> float:
    """The lower half of an interval; one that reaches 0 would have no end on a logarithmic axis."""
    return min(row.error, 0.9 * row.kl)


def by_length(results: Mapping[str, Mapping[str, Mapping[int, float]]], path: Path, title: str) -> None:
    """Plot mean KL against the number of tokens before the scored ones, one panel per text and one line per scheme, to
    an SVG or PNG file. Raises `KVPassError` without matplotlib.

    results: text -> scheme -> tokens -> mean divergence in nats.
    """
    check_plot(path)
    with _figure(path, 1, len(results), figsize=(1 + 5.5 * len(results), 5), sharey=True) as (figure, panels):
        first = next(iter(results.values()))
        names = sorted(first, key=lambda name: -max(first[name].values()))  # the legend's order is that of the lines
        for panel, (text, schemes) in zip(panels[0], results.items(), strict=True):
            for place, name in enumerate(names):
                kl, dashes = schemes[name], "-" if place < _COLORS else "--"
                color = f"C{place % _COLORS}"
                panel.plot(list(kl), list(kl.values()), "o", ms=3, lw=1, ls=dashes, color=color, label=name)
            panel.set(title=text, xlabel="tokens of the prompt", xscale="log", yscale="log")
            ticks = sorted({tokens for kl in schemes.values() for tokens in kl})
            panel.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
            panel.minorticks_off()
            panel.grid(which="major", lw=0.3)
        panels[0][0].set_ylabel("mean KL to full precision, nats")
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False)
        figure.suptitle(title)


def lines(series: Mapping[str, Sequence[float | None]], path: Path, title: str, ylabel: str) -> None:
    """Plot one line per name over layers, to an SVG or PNG file. None leaves a layer out. Raises `KVPassError` without
    matplotlib."""
    check_plot(path)
    with _figure(path, 1, 1, figsize=(5.5, 3.5)) as (_, [[panel]]):
        for name, values in series.items():
            panel.plot([float("nan") if value is None else value for value in values], "o-", ms=3, lw=0.8, label=name)
        panel.set(title=title, xlabel="layer", ylabel=ylabel)
        panel.grid(lw=0.3)
        panel.legend()
