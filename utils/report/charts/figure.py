"""Figure setup shared by all charts: colours, size, panel style, saving."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tessera.utils.files import atomic_write
from tessera.utils.report.palette import class_hex, drawable, font_families

BLUE, RED = class_hex(9), class_hex(0)
INK, GRID = "#333333", "#dddddd"
NAMED_CLASSES = 130  # above it, names along an axis would run into each other: indices instead


def class_label(text: str, limit: int) -> str:
    """Return a class name that matplotlib takes literally: no mathtext between dollars, not hidden by an underscore."""
    shown = drawable(text, limit).replace("$", r"\$")
    return f"\u200a{shown}" if shown.startswith("_") else shown


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches at 100 dpi."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style(axes: Axes, title: str, x: str, y: str) -> None:
    """Apply the style of all panels."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def explain_empty(axes: Axes, why: str) -> None:
    """Write in a panel why it is empty."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=INK, fontsize=12)
    axes.set(xticks=[], yticks=[])


def save(figure: Figure, target: Path) -> None:
    """Write the figure atomically."""
    for text in figure.findobj(lambda artist: hasattr(artist, "set_fontfamily")):
        text.set_fontfamily(list(font_families()))  # type: ignore[attr-defined]
    options = {"quality": 92} if target.suffix.lower() in {".jpg", ".jpeg"} else {}
    with atomic_write(target) as file:
        figure.savefig(file, format=target.suffix[1:].lower(), pil_kwargs=options)
