"""Draws the pictures of schedules.md from torch's own schedules: ``python docs/figures/draw_schedules.py``."""

from __future__ import annotations

from pathlib import Path

from lockstep.parallel.pipeline import orders_of
from lockstep.parallel.pipeline_config import SCHEDULES, choose_pipeline_config
from lockstep.parallel.pipeline_trace import simulate
from lockstep_tools.scaling.plots import draw_pipelines

WORKERS, MICROBATCHES = 4, 8
FOLDER = Path(__file__).parent / "schedules"


def pictures() -> dict[str, str]:
    """The name of each file and what is in it; all have one scale, so that their lengths compare."""
    traces = {name: simulate(orders_of(choose_pipeline_config(name, MICROBATCHES, WORKERS))) for name in SCHEDULES}
    length = max(trace.length for trace in traces.values())
    return {f"{name}.svg": draw_pipelines({name: trace}, length=length) for name, trace in traces.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pictures().items():
        (FOLDER / file).write_text(text)
