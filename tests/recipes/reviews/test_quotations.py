"""Quotation marks that would swallow rows are refused, or warned of, with their line; those around a review are not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep_tools.recipes.reviews.dataset import read_csv

ROWS = [f"{number % 2},review {number}" for number in range(40)]
OPEN, CLOSED = 10, 20  # rows; the header is line 1, so row 10 is line 12


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hotel.csv"


def write(
    path: Path, rows: list[str], *, header: str = "label,review", end: str = "\n", last: str | None = None
) -> None:
    path.write_bytes((end.join([header, *rows]) + (end if last is None else last)).encode())


def opened(rows: list[str], row: int = OPEN) -> list[str]:
    """The rows with a mark at the beginning of one review."""
    return [text.replace(",", ',"', 1) if number == row else text for number, text in enumerate(rows)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [None, ""])
def test_a_mark_that_is_never_closed_is_named_with_its_line(end: str, last: str | None, path: Path):
    write(path, opened(ROWS), end=end, last=last)
    with pytest.raises(
        DataError, match="line 12: the quotation mark that begins here is never closed, so the 29 lines"
    ):
        read_csv(path)


def test_its_line_is_right_below_reviews_of_several_lines(path: Path):
    write(path, ['1,"good\n\nvery"', "", *opened(ROWS)])
    with pytest.raises(DataError, match="line 16: the quotation mark that begins here is never closed"):
        read_csv(path)


def test_an_open_mark_over_more_than_the_csv_module_reads_is_named(path: Path):
    write(path, opened([f"{number % 2},{'very ' * 200}{number}" for number in range(300)]))
    with pytest.raises(DataError, match="line 12: the value in quotation marks that begins here is not closed in the"):
        read_csv(path)


@pytest.mark.parametrize("columns", [2, 4])
def test_two_open_marks_close_each_other(columns: int, path: Path):
    rows = ROWS if columns == 2 else [f"2024,{row},x" for row in ROWS]
    header = "label,review" if columns == 2 else "date,label,review,room"
    marked = [
        text.replace(",review", ',"review') if number in (OPEN, CLOSED) else text for number, text in enumerate(rows)
    ]
    write(path, marked, header=header)

    with pytest.raises(
        DataError, match="line 12: the quotation mark that begins here is closed by one in the middle of"
    ):
        read_csv(path)


@pytest.mark.parametrize("header", ["label,review", "review,label"])
def test_a_mark_at_the_end_of_another_review_closes_it(header: str, path: Path):
    reverse = header == "review,label"
    rows = [",".join(reversed(row.split(","))) if reverse else row for row in ROWS]
    rows[OPEN] = f'"{rows[OPEN]}' if reverse else rows[OPEN].replace(",", ',"')
    rows[CLOSED] = rows[CLOSED].replace(",", '",') if reverse else f'{rows[CLOSED]}"'
    write(path, rows, header=header)
    with pytest.raises(DataError, match="line 12: the 10 lines below are within the quotation marks"):
        read_csv(path)


def test_one_row_within_marks_is_warned_of(path: Path):
    rows = opened(ROWS)
    rows[OPEN + 1] += '"'
    write(path, rows)
    with pytest.warns(UserWarning, match="line 12: within the quotation marks that begin here there are lines that"):
        assert len(read_csv(path).reviews) == 39


@pytest.mark.parametrize(
    "review",
    [
        "good\nbut loud, very\n\nat night",
        "good,\r\n5 of 5, I think",
        "three things:\n7,clean\n8,quiet\n9,near",
        'they said ""yes""\nand ""no"", twice',
        '""quoted""\nto the ""end""',
    ],
)
def test_reviews_of_several_lines_are_read(review: str, path: Path):
    write(path, [*ROWS, f'1,"{review}"', *ROWS])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = read_csv(path)
    assert len(table.reviews) == 81
    assert table.reviews[40].text == review.replace('""', '"')


def test_a_numbered_list_in_a_review_is_read(path: Path):
    write(path, [*ROWS, '1,"0,clean\n1,quiet"', *ROWS])
    with pytest.warns(UserWarning, match="line 42: within"):
        assert read_csv(path).reviews[40].text == "0,clean\n1,quiet"


def test_marks_within_a_line_are_text_or_left_out_as_before(path: Path):
    write(path, ['1,a "good" room', '1,"good" rooms', '1,"very ""good"" rooms"', '0,5" screen'])
    texts = [review.text for review in read_csv(path).reviews]
    assert texts == ['a "good" room', "good rooms", 'very "good" rooms', '5" screen']


def test_values_between_tabs_are_refused_with_what_is_expected(path: Path):
    write(path, [row.replace(",", "\t") for row in ROWS], header="label\treview")
    with pytest.raises(DataError, match="expected label and review, separated by commas"):
        read_csv(path)
