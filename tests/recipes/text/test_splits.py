from __future__ import annotations

from lockstep_tools.recipes.text.corpus import split_by_position


def test_of_every_twenty_lines_the_19th_validates_and_the_20th_tests():
    lines = [str(number) for number in range(45)]
    parts = split_by_position(lines, source="numbers")
    assert parts.valid == ("18", "38")
    assert parts.test == ("19", "39")
    assert parts.train == tuple(line for line in lines if line not in {*parts.valid, *parts.test})
    assert parts.source == "numbers"
