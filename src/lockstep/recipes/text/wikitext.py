"""Text from a folder in the layout of wikitext.

One file each of ``*.train.tokens``, ``*.valid.tokens`` and ``*.test.tokens``, UTF-8, one paragraph a line. Lines of 100
characters or fewer (headings, blanks) are left out.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import DataError
from lockstep.recipes.text.splits import MINIMUM_CHARACTERS, TextSplits


def read_wikitext(folder: Path, *, longer_than: int = MINIMUM_CHARACTERS) -> TextSplits:
    """Reads the three parts of a wikitext folder.

    Args:
        folder: holds exactly one file for each part, such as ``wiki.train.tokens``.
        longer_than: shorter lines, in characters, and those of just this length are left out.

    Raises:
        DataError: the folder or a file is missing, doubled, unreadable, not UTF-8, or has no line left.
    """
    if not folder.is_dir():
        raise DataError(
            f"text folder {str(folder)!r} does not exist or is no folder; expected one with *.train.tokens,"
            " *.valid.tokens and *.test.tokens; correct --text, or leave it out for the embedded text"
        )
    return TextSplits(
        train=_read_part(folder, "train", longer_than),
        valid=_read_part(folder, "valid", longer_than),
        test=_read_part(folder, "test", longer_than),
        source=str(folder),
    )


def _read_part(folder: Path, part: str, longer_than: int) -> tuple[str, ...]:
    path = _only_file(folder, f"*.{part}.tokens")
    lines = tuple(line for line in map(str.strip, _read(path).splitlines()) if len(line) > longer_than)
    if not lines:
        raise DataError(
            f"text file {str(path)!r} has no line longer than {longer_than} characters; expected one"
            " paragraph a line; join the lines of each paragraph, or give another --text folder"
        )
    return lines


def _only_file(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise DataError(
            f"text folder {str(folder)!r} holds {len(found)} files {pattern} ({names}), expected exactly one;"
            " add or remove files so that each of train, valid and test has one"
        )
    return found[0]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"text file {str(path)!r} is not UTF-8 (byte {error.start}: {error.reason}); expected UTF-8 text;"
            " convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise DataError(
            f"text file {str(path)!r} cannot be read ({error.strerror}); expected a readable UTF-8 file;"
            " check its kind and permissions"
        ) from error
