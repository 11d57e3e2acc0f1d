from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.recipes.reviews.dataset import Review, read_csv


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hotel.csv"


def test_reviews_are_read_in_order_and_rows_without_one_are_counted(path: Path):
    path.write_text('label,review\n1,很好\n0,"脏，\n而且吵"\n1,\n0,　 \n1\n\n1.0, 不错 \n', encoding="utf-8")

    table = read_csv(path)

    assert table.reviews == (
        Review(text="很好", label=1),
        Review(text="脏，\n而且吵", label=0),
        Review(text="不错", label=1),
    )
    assert table.empty == 3
    assert table.source == str(path)


def test_other_columns_any_order_and_another_separator_do_no_harm(path: Path):
    path.write_text("date\treview \tlabel\n1月\t好, 很好\t1\n", encoding="utf-8")

    assert read_csv(path, separator="\t").reviews == (Review(text="好, 很好", label=1),)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "gb18030", "utf-16"])
def test_a_file_of_another_encoding_or_with_a_byte_order_mark_is_read(path: Path, encoding: str):
    path.write_text("label,review\r\n1,很好\r\n", encoding=encoding)

    assert read_csv(path, encoding=encoding.removesuffix("-sig")).reviews == (Review(text="很好", label=1),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty, expected a CSV file with the columns label and review"),
        ("a,b\n1,x\n", "no column label and no column review; its first line has 'a', 'b'; expected label and review"),
        ("label;review\n1;x\n", "first line has 'label;review'; expected label and review, separated by"),
        ("1,x\n0,y\n", "first line has '1', 'x'"),
        (",".join("abcdefghijk"), "'h' and 3 more"),
        ("label,review\n", "holds no review: 0 rows, none with a text"),
        ("label,review\n1,\n0,\n", "holds no review: 2 rows, none with a text"),
        ('label,review\n1,"x\ny"\ngood,z\n', "line 4: the label 'good' is not an integer"),
        ("label,review\n0.5,x\n", "line 2: the label '0.5' is not an integer"),
        ("label,review\nnan,x\n", "line 2: the label 'nan' is not an integer"),
        ("label,review\ninf,x\n", "line 2: the label 'inf' is not an integer"),
        ("label,review\n,x\n", "line 2: the label '' is not an integer"),
        ("review,label\nx\n", "line 2: the label '' is not an integer"),
        ("label,review\n1,a\n1,b,c\n", "line 3: 3 values for 2 columns; put a review that contains the separator"),
        (
            'label,review\n1,a\n1,"' + 200_000 * "x" + "\n",
            "line 3: field larger than field limit (131072)",
        ),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(content: str, said: str, path: Path):
    path.write_text(content, encoding="utf-8")

    with pytest.raises(DataError) as raised:
        read_csv(path)

    assert said in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "encoding", "said"),
    [
        ("label,review\n1,a\n1,很好\n".encode("gb18030"), "utf-8", "byte 19 (0xba, line 3) is invalid"),
        ("label,review\n1,很好\n".encode("gb18030"), "utf-8", "it can be read as gb18030: give --encoding gb18030"),
        ("label,review\n1,很好很好\n".encode("utf-16"), "utf-8", "it can be read as utf-16: give --encoding utf-16"),
        ("label,review\n1,很好\n".encode(), "ascii", "it can be read as utf-8: give --encoding utf-8"),
        (b"label,review\n1,\xff\xff\xff", "utf-8", "give its --encoding"),
    ],
)
def test_a_wrong_encoding_is_named_with_the_byte_and_one_that_would_do(
    content: bytes, encoding: str, said: str, path: Path
):
    path.write_bytes(content)

    with pytest.raises(DataError) as raised:
        read_csv(path, encoding=encoding)

    assert f"is not {encoding}" in str(raised.value)
    assert said in str(raised.value)


def test_a_missing_file_and_a_folder_are_refused(path: Path):
    with pytest.raises(DataError, match="does not exist; give the path of a CSV file"):
        read_csv(path)
    with pytest.raises(DataError, match="is a folder, expected a CSV file"):
        read_csv(path.parent)
