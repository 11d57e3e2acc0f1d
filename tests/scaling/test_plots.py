"""Drawings of pipelines, read as XML. The page's tests see those of a scaling run."""

from __future__ import annotations

from xml.etree import ElementTree

from lockstep.parallel.pipeline_trace import Action, PipelineTrace, Slot
from lockstep_tools.scaling.plots import draw_pipelines


def slot(kind: str, stage: int, microbatch: int, begin: float, end: float) -> Slot:
    return Slot(action=Action(kind=kind, stage=stage, microbatch=microbatch), begin=begin, end=end)  # type: ignore[arg-type]


TRACE = PipelineTrace(
    workers=(
        (slot("forward", 0, 0, 10.0, 11.0), slot("backward", 0, 0, 14.0, 16.0)),
        (slot("forward", 1, 0, 11.0, 12.0), slot("backward", 1, 0, 12.0, 14.0)),
    )
)


def test_traces_are_below_each_other_with_their_idle_share_and_numbered_actions():
    root = ElementTree.fromstring(draw_pipelines({"a & b": TRACE, "c": TRACE}))
    written = [str(text.text) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in written if "idle" in text] == ["a & b, idle 50.0%", "c, idle 50.0%"]
    assert (written.count("worker 0"), written.count("worker 1"), written.count("1")) == (2, 2, 8)
    assert written[-2:] == ["forward", "backward"]
