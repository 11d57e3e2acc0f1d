from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import load_dataset
from pandas._libs.parsers import STR_NA_VALUES

from lockstep.errors import DataError
from lockstep_tools.recipes.reviews.config import ReviewsConfig
from lockstep_tools.recipes.reviews.dataset import NA_VALUES, Review, read_csv, read_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hotel.csv"


def test_reviews_are_read_in_order_and_rows_without_one_are_counted(path: Path):
    path.write_text('label,review\n1,很好\n0,"脏，\n而且吵"\n1,\n0,""\n1\n\n1.0, 不错 \n0,　 \n', encoding="utf-8")

    table = read_csv(path)

    assert table.reviews == (
        Review(text="很好", label=1),
        Review(text="脏，\n而且吵", label=0),
        Review(text=" 不错 ", label=1),
        Review(text="　 ", label=0),
    )
    assert (table.empty, table.rows) == (3, 7)
    assert table.source == str(path)


def test_words_for_missing_values_are_those_of_load_dataset(path: Path, tmp_path: Path):
    others = ["na", "Null", "none", "N/a", " NA", "NA ", "NA, none", "-", "nil", "123"]
    words = [*filter(None, STR_NA_VALUES), *others]
    path.write_text("label,review\n" + "".join(f'1,{word}\n0,"{word}"\n' for word in words), encoding="utf-8")
    path.write_text(path.read_text().replace("1,NA, none\n", ""))
    table = read_csv(path)

    expected = load_dataset("csv", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))

    reviews = [(review.text, review.label) for review in table.reviews]
    assert reviews == [(row["review"], row["label"]) for row in expected if row["review"] is not None]
    assert table.missing == dict.fromkeys(NA_VALUES, 2)
    assert STR_NA_VALUES - {""} == NA_VALUES
    assert table.rows == len(expected)
    assert read_csv(path, na_values=()).missing == {}


def test_a_word_for_a_missing_value_is_a_review_if_asked_for_and_never_a_label(path: Path):
    path.write_text("label,review\n1,NA\n0,x\nNA,null\n", encoding="utf-8")
    assert read_table(ReviewsConfig(data=path)).missing == {"NA": 1, "null": 1}
    with pytest.raises(DataError, match="line 4: the label 'NA' is not an integer, expected one for each class"):
        read_table(ReviewsConfig(data=path, keep_na=True))
    path.write_text("label,review\n1,NA\n0,x\n", encoding="utf-8")
    assert [review.text for review in read_table(ReviewsConfig(data=path, keep_na=True)).reviews] == ["NA", "x"]


def test_other_columns_and_any_order_do_no_harm(path: Path):
    path.write_text('date,review ,label\n1月,"好, 很好",1\n', encoding="utf-8")
    assert read_csv(path).reviews == (Review(text="好, 很好", label=1),)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("utf-8-sig", "utf-8"),
        ("utf-8-sig", "UTF-8"),
        ("utf-8-sig", "utf8"),
        ("utf-8", "utf8"),
        ("gb18030", "gb18030"),
        ("utf-16", "utf-16"),
    ],
)
def test_a_file_of_another_encoding_or_with_a_byte_order_mark_is_read(path: Path, written: str, read: str):
    path.write_text("label,review\r\n1,很好\r\n", encoding=written)
    assert read_csv(path, encoding=read).reviews == (Review(text="很好", label=1),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty; expected the columns label and review in line 1; correct --data"),
        (
            "\n\nlabel,review\n1,x\n",
            "begins with a blank line; expected the columns label and review in line 1; remove",
        ),
        ("label,review,review\n1,x,y\n", "has several columns called review: columns 2 and 3; expected one; rename"),
        ("label,review, label\n1,x,0\n", "has several columns called label: columns 1 and 3; expected one; rename"),
        (
            'label,review\n1,"he said \\"good, really\\" to me"\n',
            'put quotes around such a review and write each quotation mark in it twice, "", and not as \\"',
        ),
        ("a,b\n1,x\n", "has the columns 'a, b'; expected label and review"),
        ("label;review\n1;x\n", "has the columns 'label;review'"),
        ("label,review\n", "holds no review: 0 rows, none with a text"),
        ("label,review\n1,\n0,NA\n", "holds no review: 2 rows, none with a text"),
        ('label,review\n1,"x\ny"\ngood,z\n', "line 4: the label 'good' is not an integer"),
        ("label,review\n0.5,x\n", "line 2: the label '0.5' is not an integer"),
        ("label,review\nnan,x\n", "line 2: the label 'nan' is not an integer"),
        ("label,review\ninf,x\n", "line 2: the label 'inf' is not an integer"),
        ("label,review\n,x\n", "line 2: the label '' is not an integer"),
        ("review,label\nx\n", "line 2: the label '' is not an integer"),
        ("label,review\n1,a\n1,b,c\n", "line 3: more values than columns; put quotes around such a review"),
        (
            'label,review\n1,a\n1,"' + 200_000 * "x" + "\n",
            "cannot be read after line 2 (field larger than field limit (131072))",
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


@pytest.mark.parametrize("encoding", ["utf-8", "utf8mb4"])
def test_a_wrong_encoding_is_refused_with_the_flag_that_helps(encoding: str, path: Path):
    path.write_bytes("label,review\n1,a\n1,很好\n".encode("gb18030"))
    with pytest.raises(DataError, match=f"expected CSV in {encoding}; correct --data, or give the --encoding, such as"):
        read_csv(path, encoding=encoding)


def archive(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("xl/worksheets/sheet1.xml", content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            lambda text: text.encode("utf-16"),
            "seems to be in UTF-16; expected CSV in utf-8; give --encoding utf-16, or",
        ),
        (lambda text: text.encode("utf-16-be"), "seems to be in UTF-16-BE; .* give --encoding utf-16-be, or save"),
        (lambda text: text.encode("utf-16-le"), "seems to be in UTF-16-LE; .* give --encoding utf-16-le, or save"),
        (lambda text: text.encode("utf-32"), "seems to be in UTF-32; .* give --encoding utf-32, or save it as UTF-8"),
        (lambda text: gzip.compress(text.encode()), "is compressed with gzip; expected CSV in utf-8; unpack it"),
        (lambda text: archive(text.encode()), r"is a workbook \(xlsx\) or another zip archive; .* export the sheet"),
    ],
)
def test_a_file_of_another_format_is_told_by_its_first_bytes(
    written: Callable[[str], bytes], said: str, path: Path
) -> None:
    path.write_bytes(written("label,review\n1,很好\n"))
    with pytest.raises(DataError, match=said):
        read_csv(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_the_encoding_that_is_named_reads_the_file(encoding: str, path: Path) -> None:
    path.write_bytes("label,review\n1,很好\n".encode(encoding))
    assert read_csv(path, encoding=encoding).reviews == (Review(text="很好", label=1),)


def test_a_missing_file_and_a_folder_are_refused(path: Path):
    for missing in (path, path.parent):
        with pytest.raises(DataError, match="does not exist or is a folder"):
            read_csv(missing)
