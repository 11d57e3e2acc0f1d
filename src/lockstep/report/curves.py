"""The curves of a run as a picture: one panel for the loss and one for each metric, training beside validation.

Drawn with matplotlib's object interface: no window, no pyplot state, no settings of the caller touched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.atomic_files import atomic_file
from lockstep.errors import ConfigError
from lockstep.extras import require

_TRAINING, _VALIDATION, _TEST = "#2f5d8a", "#d9822b", "#5c8a3c"
_INK, _QUIET = "#30343b", "#d9dce1"
# Recorded with the history, and no measure of how well the model does.
_NOT_CURVES = frozenset({"epoch", "seconds", "ms_per_step", "examples_per_s", "lr"})


def draw_curves(
    history: Mapping[str, Sequence[float]],
    path: str | os.PathLike[str],
    *,
    title: str,
    test: Mapping[str, float] | None = None,
) -> Path:
    """Draws loss and metrics over the epochs and writes them as a PNG.

    The file is written aside and renamed, so that a reader never sees half a picture.

    Args:
        history: name -> one value an epoch; ``val_NAME`` is drawn in the panel of ``NAME``, which may lack the other.
        path: the file to write; its folder is made where it is missing.
        title: a line above the panels.
        test: name -> the final test result, drawn as a mark at the last epoch.

    Returns:
        The path written.

    Raises:
        ConfigError: the history holds no curve.
        MissingExtraError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(name.removeprefix("val_") for name in history if name not in _NOT_CURVES))
    if not any(history.get(name) or history.get(f"val_{name}") for name in names):
        raise ConfigError(f"a history of {sorted(history)} holds no epoch to draw; expected 'loss'; train first")
    require("matplotlib", "plots")
    figure = _figure(len(names), title)
    for axes, name in zip(figure.axes, names, strict=True):
        _panel(axes, name, history, (test or {}).get(name))
    return _write(figure, Path(path))


def _figure(panels: int, title: str) -> Any:
    figure = require("matplotlib.figure", "plots").Figure(
        figsize=(4.4 * panels + 0.4, 3.6), dpi=160, facecolor="white", layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.05)
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, color=_INK)
    figure.subplots(1, panels)
    return figure


def _panel(axes: Any, name: str, history: Mapping[str, Sequence[float]], test: float | None) -> None:
    training, validation = history.get(name, ()), history.get(f"val_{name}", ())
    epochs = max(len(training), len(validation))
    if training:
        _curve(axes, training, _TRAINING, "training")
    if validation:
        _curve(axes, validation, _VALIDATION, "validation")
    if test is not None:
        axes.plot([epochs], [test], marker="D", markersize=5.5, color=_TEST, label="test", linestyle="none", zorder=4)
    _quiet(axes, name, epochs)


def _curve(axes: Any, values: Sequence[float], color: str, label: str) -> None:
    epochs = range(1, len(values) + 1)
    axes.plot(epochs, values, color=color, label=label, linewidth=1.8, marker="o", markersize=3.6, zorder=3)


def _quiet(axes: Any, name: str, epochs: int) -> None:
    """A light grid, no box, whole epochs on the axis."""
    ticker = require("matplotlib.ticker", "plots")
    axes.set_title(name, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("epoch", fontsize=9, color=_INK)
    axes.set_xlim(0.8, max(epochs, 2) + 0.2)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=8, integer=True))
    axes.grid(axis="y", color=_QUIET, linewidth=0.7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)


def _write(figure: Any, path: Path) -> Path:
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")
    return path
