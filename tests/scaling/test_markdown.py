from __future__ import annotations

from lockstep.scaling.report import render_markdown, terminal_tables


def test_every_row_and_what_it_rests_on_is_in_the_tables(make):
    text = render_markdown(make.result())

    assert text.startswith("# Scaling of images, 2026-01-31\n\n- date: 2026-01-31\n")
    assert "| 1 device | 1 core | 64 | 100 | 40.20 | 2 of 100 steps | 159.2 | 402.0 |" in text
    assert "| 4 replicas, 4 times the total | 4 cores | 256 | 100 |" in text
    assert "- command: `lockstep bench scaling images --devices cpu:4`" in text
    assert "- devices: the CPU as 4 logical devices of 1 core each (--devices cpu:4)" in text
    assert "3 rounds, the configurations in turn, each in a fresh process; in each 3 steps of warm-up" in text


def test_words_are_to_the_left_and_numbers_to_the_right(make):
    rules = [line for line in render_markdown(make.result()).splitlines() if line.startswith("| ---")]

    assert rules[0] == "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert rules[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"


def test_a_terminal_gets_both_tables(make):
    text = terminal_tables(make.result())

    assert text.count("4 replicas, same total") == 2
    assert "where the time of a step goes" in text
