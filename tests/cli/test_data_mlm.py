"""What ``lockstep data mlm`` says of a text."""

from __future__ import annotations

from lockstep.cli.data import text_summary
from lockstep.recipes.text.corpus import TextSplits

SPLITS = TextSplits(train=("one two three", "four " * 40), valid=("five six",), test=("seven",), source="a folder")


def test_counts_the_lines_words_and_characters_of_every_part():
    rows = [line.split() for line in text_summary(SPLITS, lines=0).splitlines()]

    assert rows[0] == ["text:", "a", "folder"]
    assert rows[2] == ["split", "lines", "words", "characters"]
    assert rows[4:] == [["train", "2", "43", "213"], ["valid", "1", "2", "8"], ["test", "1", "1", "5"]]


def test_shows_the_first_lines_cut_to_one_line():
    shown = text_summary(SPLITS, lines=2).split("\n\n")[2].splitlines()

    assert shown[0] == "train one two three"
    assert shown[1].startswith("train four four")
    assert shown[1].endswith("...")
    assert [line.split()[0] for line in shown[2:]] == ["valid", "test"]
