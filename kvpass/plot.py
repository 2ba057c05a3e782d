"""Quality against bits, drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .errors import KVPassError
from .evaluate import Quality

FORMATS = (".png", ".svg")
_OFFSETS = [
    (x, y)
    for r in (6, 12, 20, 30, 42)
    for x, y in ((r, 0), (-r, 0), (r, r), (-r, r), (r, -r), (-r, -r), (0, r), (0, -r))
]
_SHOWN = 1e-4  # nats; full precision has no place on a logarithmic axis


@dataclass(frozen=True)
class Point:
    """bits: a value; kl: mean divergence in nats; error: half the width of its 95 % interval."""

    name: str
    bits: float
    kl: float
    error: float


def points(rows: Sequence[Quality]) -> list[Point]:
    """The point of each row."""
    return [Point(row.scheme, row.bits_per_value, row.kl, row.kl_error) for row in rows]


def check_plot(path: Path) -> None:
    """Raise `KVPassError` unless a picture can be drawn to ``path``: before anything is measured."""
    if path.suffix not in FORMATS:
        raise KVPassError(
            f"{path.name!r} is no picture that can be drawn: use a name ending in {' or '.join(FORMATS)}."
        )
    if find_spec("matplotlib") is None:
        raise KVPassError("Drawing needs matplotlib: pip install 'kvpass[plot]', or leave --plot out.")


def front(rows: Sequence[Point]) -> list[Point]:
    """The rows that no other beats in both bits and mean KL, by bits."""
    best, kept = float("inf"), []
    for row in sorted(rows, key=lambda row: (row.bits, row.kl)):
        if row.kl < best:
            best, kept = row.kl, [*kept, row]
    return kept


def pareto(results: Mapping[str, Sequence[Point]], path: Path, title: str) -> None:
    """Mean KL with its 95 % interval against bits a value, a panel for each text, to an SVG or PNG file.

    Points are labelled, those on the Pareto front connected. Rows of a mean KL below 1e-4, such as full precision, are
    left out. Raises `KVPassError` without matplotlib, or if nothing is left to draw.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = {text: [row for row in rows if row.kl >= _SHOWN] for text, rows in results.items()}
    if not all(shown.values()):
        raise KVPassError(f"No scheme has a mean KL of {_SHOWN} or more: there is nothing to draw.")
    with matplotlib.rc_context({"svg.hashsalt": "kvpass", "svg.fonttype": "none", "font.size": 9}):
        figure, panels = pyplot.subplots(
            1, len(shown), figsize=(1 + 5 * len(shown), 5), sharey=True, squeeze=False, layout="constrained"
        )
        for panel, (text, rows) in zip(panels[0], shown.items(), strict=True):
            _draw(panel, rows)
            panel.set(title=text, xlabel="bits per value, everything kept", yscale="log")
        panels[0][0].set_ylabel("mean KL to full precision, nats")
        figure.suptitle(title)
        figure.draw_without_rendering()
        for panel, rows in zip(panels[0], shown.values(), strict=True):
            _label(panel, rows)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _draw(panel, rows: Sequence[Point]) -> None:
    best = front(rows)
    for row in rows:
        color = "C0" if row in best else "0.45"
        low = min(row.error, 0.9 * row.kl)  # an interval that reaches 0 has no end on a logarithmic axis
        panel.errorbar(row.bits, row.kl, [[low], [row.error]], fmt="o", ms=4, lw=0.8, color=color)
    panel.plot([row.bits for row in best], [row.kl for row in best], "C0--", lw=0.8, zorder=0)
    panel.grid(which="major", lw=0.3)
    panel.margins(x=0.12, y=0.06)


def _label(panel, rows: Sequence[Point]) -> None:
    """Names beside their points, each at the nearest place where it covers no point and no other name."""
    renderer = panel.figure.canvas.get_renderer()
    points = [panel.transData.transform((row.bits, row.kl)) for row in rows]
    taken = []
    for row in sorted(rows, key=lambda row: row.kl):
        at = row.bits, row.kl
        label = panel.annotate(row.name, at, textcoords="offset points", fontsize=8, va="center")
        for x, y in _OFFSETS:
            label.set_ha("left" if x > 0 else "right" if x < 0 else "center")
            label.xyann = (x, y)
            box = label.get_window_extent(renderer)
            inside = (
                panel.bbox.x0 < box.x0 and box.x1 < panel.bbox.x1 and panel.bbox.y0 < box.y0 and box.y1 < panel.bbox.y1
            )
            if inside and not any(box.overlaps(other) for other in taken) and not any(box.contains(*p) for p in points):
                break
        taken.append(box)
        if max(abs(x), abs(y)) > _OFFSETS[8][0]:
            panel.annotate("", at, (x, y), textcoords="offset points", arrowprops=dict(arrowstyle="-", lw=0.4))
