"""The page as text, and as a person sees it: opened in headless Chromium, wide and narrow, light and dark."""

from __future__ import annotations

import re

import pytest

from lockstep_tools.scaling.measure import PARTS
from lockstep_tools.scaling.report import PART_HEADINGS, ROW_HEADINGS, part_cells, render_page, row_cells


def test_the_page_asks_for_nothing_and_runs_nothing(make):
    page = render_page(make.result())
    links = set(re.findall(r"""\b(?:src|href|action|data)\s*=\s*["']?([^"'>\s]*)""", page))
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    assert not re.search(r"<script|@import|url\((?!#)", page)
    assert set(re.findall(r"https?:[^\"]*", page)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",
    }  # fmt: skip
    assert "default-src 'none'" in page


def test_what_others_wrote_is_text_and_no_markup(make):
    page = render_page(make.result())
    assert "made-up &lt;pictures&gt;" in page
    assert "A &lt;processor&gt;" in page
    assert "<pictures>" not in page


@pytest.mark.slow
def test_a_browser_shows_every_number_and_all_plots(make, browse):
    result = make.result()
    shown = browse(render_page(result), width=1400)

    assert shown.console == []
    assert (shown.seen["width"], shown.seen["scrolls"]) == (1400, 1400)
    assert shown.seen["background"] == "rgb(252, 252, 250)"
    assert shown.seen["title"] == "Scaling of images, 2026-01-31"
    speed, parts = shown.seen["tables"]
    assert speed == [list(ROW_HEADINGS), *(row_cells(row) for row in result.rows)]
    assert parts == [list(PART_HEADINGS), *(part_cells(row) for row in result.rows)]
    assert set(shown.seen["alignments"]) == {"right"}
    assert min(shown.seen["figures"]["plots"]) > 300
    written = shown.seen["plotted"]
    for row in result.rows:
        assert written.count(row.configuration.name) == 1
    assert set(PARTS) <= set(written)


def test_the_same_result_draws_the_same_page(make):
    assert render_page(make.result()) == render_page(make.result())


@pytest.mark.slow
def test_a_narrow_window_shows_the_same_and_nothing_sticks_out(make, browse):
    result = make.result()
    shown = browse(render_page(result), width=400, dark=True)
    assert (shown.seen["width"], shown.seen["scrolls"]) == (400, 400)
    assert shown.seen["background"] == "rgb(21, 23, 26)"
    assert [row[0] for row in shown.seen["tables"][0][1:]] == [row.configuration.name for row in result.rows]
    assert min(min(box) for box in shown.seen["figures"].values()) > 50


@pytest.mark.slow
def test_a_browser_refuses_what_the_page_would_ask_for(make, browse):
    tampered = render_page(make.result()).replace("</main>", '<img src="https://example.invalid/a.png"></main>')
    (line,) = browse(tampered, width=800).console
    assert "Content Security Policy" in line
