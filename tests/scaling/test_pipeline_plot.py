"""Pictures of timetables: read as XML, and measured."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lockstep.parallel.pipeline_trace import Action, PipelineTrace, Slot
from lockstep.scaling.pipeline_plot import Scale, draw_trace, draw_traces

SVG = "{http://www.w3.org/2000/svg}"


def slot(kind: str, stage: int, microbatch: int, begin: float, end: float) -> Slot:
    return Slot(action=Action(kind=kind, stage=stage, microbatch=microbatch), begin=begin, end=end)  # type: ignore[arg-type]


TABLE = PipelineTrace(
    workers=(
        (slot("forward", 0, 0, 10.0, 11.0), slot("backward", 0, 0, 14.0, 16.0)),
        (slot("forward", 1, 0, 11.0, 12.0), slot("backward", 1, 0, 12.0, 14.0)),
    )
)


def boxes(text: str) -> dict[str, tuple[float, float]]:
    """What each box says -> (left, width)."""
    found = {}
    for box in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        words = box.find(f"{SVG}title")
        if words is not None:
            found[str(words.text)] = (float(box.attrib["x"]), float(box.attrib["width"]))
    return found


def test_a_box_is_as_wide_as_its_action_is_long_and_where_it_is_in_time():
    scale = Scale(length=8.0)
    found = boxes(draw_trace(TABLE, scale, title="<one>"))

    first, last = found["forward, microbatch 1, stage 0"], found["backward, microbatch 1, stage 0"]
    assert first[1] + 1 == pytest.approx(scale.unit, abs=0.01)
    assert last[1] + 1 == pytest.approx(2 * scale.unit, abs=0.01)
    assert last[0] - first[0] == pytest.approx(4 * scale.unit, abs=0.01)  # from the first action on, not from 0
    assert len(found) == 4


def test_the_title_and_the_numbers_are_text():
    root = ElementTree.fromstring(draw_trace(TABLE, Scale(length=8.0), title="<one>"))

    assert root.findtext(f"{SVG}title") == "<one>"
    written = [text.text for text in root.iter(f"{SVG}text")]
    assert written[:2] == ["worker 0", "1"]
    assert written[-2:] == ["forward", "backward"]


def test_several_are_below_each_other_with_their_idle_share():
    root = ElementTree.fromstring(draw_traces({"a & b": TABLE, "c": TABLE}, Scale(length=8.0), title="two"))

    written = [str(text.text) for text in root.iter(f"{SVG}text")]
    assert [text for text in written if "idle" in text] == ["a & b, idle 50.0%", "c, idle 50.0%"]
    tops = [float(text.attrib["y"]) for text in root.iter(f"{SVG}text") if text.text == "worker 0"]
    assert tops[1] - tops[0] > 2 * 26
