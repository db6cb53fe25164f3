"""The drawings of the report: inline SVG that takes its colours and its typeface from the page.

matplotlib draws with the colours below; each of them then becomes a CSS variable (--c0, --c1, ..., --ink,
--rule), so that one drawing serves light and dark pages. Legends are HTML, written by the template.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import colors, rc_context, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a93")  # Okabe-Ito, grey
DASHES = ("solid", "dashed", "dotted", "dashdot")
INK, RULE = "#5c5c66", "#dcdce0"
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a "$" in a run's name is a dollar
    "font.size": 9.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-3, 5),
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
BOX = (0.135, 0.2, 0.85, 0.725)  # of the axes in the drawing; a fixed one halves the time to draw
SMOOTHED = 80  # points from which a running mean is drawn over noisy values
MARKED = 30  # points up to which each is marked
COLUMNS, BARS = 200, 60  # of a map, of a stack: more iterations than these are averaged in groups
WIDE = 30.0  # factor between extremes from which a logarithmic scale is used


@dataclass(frozen=True)
class Line:
    """One line of a chart: finite values over iterations; `band` is a standard deviation around them."""

    label: str
    x: Floats
    y: Floats
    color: int = 0
    dash: int = 0
    band: Floats | None = None


@dataclass(frozen=True)
class Chart:
    """A drawing and its legend: label, CSS variable of the colour, index of the dash."""

    svg: Markup
    legend: list[tuple[str, str, int]]


def curve(lines: Sequence[Line], log: bool = False) -> Chart:
    """Lines over iterations.

    Args:
        lines: at least one.
        log: use a logarithmic axis if all values are positive and span more than a factor of thirty.
    """
    with rc_context(STYLE):
        drawing, axes = _canvas()
        for line in lines:
            look: dict[str, Any] = {
                "color": PALETTE[line.color % len(PALETTE)],
                "linestyle": DASHES[line.dash % len(DASHES)],
            }
            y = line.y
            if is_noisy(y):
                axes.plot(line.x, y, **look, linewidth=0.8, alpha=0.35)
                y = running_mean(y)
            axes.plot(
                line.x, y, **look, linewidth=1.6, marker="o" if len(y) <= MARKED else None, markersize=3
            )
            if line.band is not None:
                axes.fill_between(
                    line.x,
                    line.y - line.band,
                    line.y + line.band,
                    color=look["color"],
                    alpha=0.15,
                    linewidth=0,
                )
        values = np.concatenate([line.y for line in lines])
        if log and _is_wide(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _power(value)))
        elif np.ptp(values) == 0:
            axes.set_ylim(*((-0.02, 1) if values[0] == 0 else sorted((0, 2 * values[0]))))
        looks: dict[str, tuple[str, int]] = {}
        for line in lines:
            looks.setdefault(line.label, (f"c{line.color % len(PALETTE)}", line.dash % len(DASHES)))
        return Chart(_svg(drawing, values), [(label, *pair) for label, pair in looks.items()])


def is_noisy(y: Floats) -> bool:
    """Many points that jump about: a smooth curve is shown as it is."""
    return len(y) > SMOOTHED and bool(np.abs(np.diff(y, 2)).mean() > 0.02 * np.ptp(y))


def running_mean(y: Floats) -> Floats:
    """Centred mean over about a fifteenth of the points; the ends are continued by their own value."""
    half = max(1, len(y) // 30)
    padded = np.pad(y, half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")


def heat(steps: Sequence[str], x: Floats, table: Floats) -> Chart:
    """A map of sampler steps over iterations, logarithmic in colour where the values span wide.

    Args:
        steps: (K,) names of the rows.
        x: (n,) iterations, ascending.
        table: (K, n), NaN where nothing was logged.
    """
    parts = np.array_split(np.ma.masked_invalid(table), min(COLUMNS, len(x)), axis=1)
    shown = np.ma.stack([part.mean(axis=1) for part in parts], axis=1)
    norm = colors.LogNorm() if _is_wide(shown[shown > 0].compressed()) else colors.Normalize()
    with rc_context({**STYLE, "axes.grid": False}):
        drawing, axes = _canvas()
        axes.set_ylabel("sampler step")
        extent = (float(x[0]), max(float(x[-1]), float(x[0]) + 1), -0.5, len(steps) - 0.5)
        image = axes.imshow(
            shown,
            cmap="cividis",
            norm=norm,
            aspect="auto",
            origin="lower",
            extent=extent,
            interpolation="nearest",
        )
        every = -(-len(steps) // 8)
        axes.set_yticks(range(0, len(steps), every), labels=steps[::every])
        axes.set_position((0.11, BOX[1], 0.72, BOX[3]))
        bar = drawing.colorbar(image, cax=drawing.add_axes((0.85, BOX[1], 0.03, BOX[3])))
        bar.outline.set_visible(False)
        if isinstance(norm, colors.LogNorm):
            bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _power(value)))
            bar.ax.yaxis.set_minor_formatter(ticker.NullFormatter())
        return Chart(_svg(drawing, table), [])


def stack(x: Floats, parts: dict[str, Floats]) -> Chart:
    """Bars of seconds per iteration, one layer a phase, in the order given; small phases are joined.

    Args:
        x: (n,) iterations, ascending.
        parts: phase to its (n,) seconds.
    """
    names = list(parts)
    if len(names) > len(PALETTE):
        kept = names[: len(PALETTE) - 1]
        joined = np.sum([parts[name] for name in names[len(kept) :]], axis=0)
        parts = {name: parts[name] for name in kept} | {"all others": joined}
    groups = np.array_split(np.arange(len(x)), min(BARS, len(x)))
    left = np.array([x[group[0]] for group in groups])
    width = np.diff(np.append(left, x[-1] + 1)) * 0.85
    with rc_context({**STYLE, "axes.grid.axis": "y"}):
        drawing, axes = _canvas()
        axes.set_ylabel("seconds")
        base = np.zeros(len(groups))
        for index, values in enumerate(parts.values()):
            height = np.array([values[group].mean() for group in groups])
            axes.bar(left, height, width, base, align="edge", color=PALETTE[index], linewidth=0)
            base += height
        return Chart(_svg(drawing, base), [(name, f"c{index}", 0) for index, name in enumerate(parts)])


def _canvas() -> tuple[Figure, Axes]:
    drawing = Figure(figsize=(4.2, 2.25))
    axes = drawing.add_axes(BOX, xlabel="iteration")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
    return drawing, axes


def _is_wide(values: Floats) -> bool:
    return bool(len(values) and values.min() > 0 and values.max() > WIDE * values.min())


def _power(value: float) -> str:
    return re.sub(r"e([+-])0?", lambda sign: "e" + sign[1].replace("-", "−").replace("+", ""), f"{value:g}")


def _svg(drawing: Figure, data: Floats) -> Markup:
    """The drawing as inline SVG: no addresses, no fixed colours, no ids that another drawing has."""
    stream = io.StringIO()
    with rc_context({"svg.hashsalt": str(zlib.crc32(data.tobytes()))}):
        drawing.savefig(stream, format="svg", transparent=True)
    text = stream.getvalue()
    text = re.sub(r"(?s)<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :])
    text = re.sub(r' xmlns(:\w+)?="[^"]*"|(?<=<g) id="[^"]*"', "", text)
    for name, color in (("ink", INK), ("rule", RULE), *((f"c{i}", c) for i, c in enumerate(PALETTE))):
        text = text.replace(color, f"var(--{name})")
    return Markup(text)
