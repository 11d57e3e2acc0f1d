"""Draws the curves of a History: a panel for the loss and one for each metric, the validation beside the training."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any, Protocol

from lockstep.errors import DataError
from lockstep.extras import require

_CURVES = (("", "training", "#2f5d8a"), ("val_", "validation", "#d9822b"))
_TEST_COLOR = "#5c8a3c"


class EpochRecord(Protocol):
    """What is drawn of a ``History``, which describes it."""

    history: dict[str, list[float]]
    epoch: list[int]
    logged_in: dict[str, list[int]]


def draw_curves(
    figure: Any, history: EpochRecord, *, title: str = "", settings: str = "", test: Mapping[str, float] | None = None
) -> None:
    """Draws the curves into an empty figure, and sizes it.

    Args:
        figure: a matplotlib Figure.
        history: what is drawn, by the epochs in which it was logged. A panel may lack training or validation.
        title: a line above the panels.
        settings: what else the results depend on, written in small letters below the panels.
        test: name to the final test result, drawn as a dashed line over all epochs.

    Raises:
        DataError: nothing was logged.
    """
    measured = [name for name, values in history.history.items() if values and name != "learning_rate"]
    names = list(dict.fromkeys(name.removeprefix("val_") for name in measured))
    if not names:
        raise DataError("the history has no epoch to draw; train first")
    locator = require("matplotlib.ticker", "plots").MaxNLocator
    figure.set_size_inches(4.4 * len(names) + 0.4, 4.0)
    figure.set_layout_engine("constrained")
    if title:
        figure.suptitle(title)
    figure.supxlabel(fill(settings, 68 * len(names)), fontsize=8, color="#666666")
    first, last = min(history.epoch) + 1, max(history.epoch) + 1
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for prefix, label, color in _CURVES:
            if values := history.history.get(f"{prefix}{name}"):
                epochs = [epoch + 1 for epoch in history.logged_in[f"{prefix}{name}"]]
                axes.plot(epochs, values, color=color, label=label, linewidth=1.8, marker="o")
        if test and name in test:
            axes.axhline(test[name], color=_TEST_COLOR, label=f"test {test[name]:.4f}", linestyle="--", zorder=1)
        axes.set(title=name, xlabel="epoch", xlim=(first - 0.5, last + 0.5))
        axes.xaxis.set_major_locator(locator(nbins=8, integer=True, min_n_ticks=1))
        axes.grid(axis="y", color="#e5e5e5")
        axes.set_axisbelow(True)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
    # The layout engine places the panels by the ticks of the size that they had before, and the next draw by those that
    # they have then: without this draw labels such as 6.25 begin left of the picture, and half of the 6 reads as a 5.
    figure.draw_without_rendering()
