"""Reads adversarial files with TensorFlow: the lines that ``TextLineDataset`` gives, of which a filter keeps some.

Needs TensorFlow. It prints what ``tests/recipes/text/tensorflow_lines.json`` holds, bytes as the characters of Latin-1:

    python tests/recipes/text/programs/tensorflow_lines.py > tests/recipes/text/tensorflow_lines.json
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

LONG = b"a" * 101
SEPARATORS = ("\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")


def near_the_limit() -> bytes:
    """282 lines of 96 to 106 bytes: letters, spaces, tabs, carriage returns and characters of two to four bytes."""
    draw = random.Random(34)
    parts = [b" ", b"\t", b"\r", "é".encode(), "很".encode(), "🙂".encode(), *(mark.encode() for mark in SEPARATORS)]
    lines = []
    for _ in range(282):
        inner = b"".join(draw.choice(parts) if draw.random() < 0.2 else b"x" for _ in range(80))
        lines.append(inner + b" " * max(0, draw.randint(96, 106) - len(inner)))
    return b"\n".join(lines) + b"\n"


def adversarial_files() -> dict[str, bytes]:
    """Name of a case -> content of the file."""
    return {
        "empty file": b"",
        "one line feed": b"\n",
        "one carriage return": b"\r",
        "no line feed at the end": b"short\n" + LONG,
        "carriage return at the end": LONG + b"\n" + LONG + b"\r",
        "only a carriage return behind the last line feed": LONG + b"\n\r",
        "empty lines at the end": LONG + b"\n\n\n",
        "exactly 100 bytes": b"b" * 100 + b"\n" + b"b" * 101 + b"\n",
        "spaces count": b" " + b"c" * 99 + b" \n" + b"\t" + b"c" * 100 + b"\n" + b" " * 101 + b"\n",
        "bytes count": "é".encode() * 90 + b"\n" + "很".encode() * 33 + b"\n" + "很".encode() * 34 + b"\n",
        "carriage returns are dropped and do not count": b"d" * 100 + b"\r\n" + b"e" * 101 + b"\r\n",
        "carriage returns within a line": b"f" * 50 + b"\r" + b"g" * 50 + b"\r\r\n" + b"f" * 51 + b"\r" + b"g" * 50,
        "a file of carriage returns": LONG + b"\r" + LONG + b"\r",
        "a null byte": b"h" * 60 + b"\0" + b"h" * 60 + b"\n",
        "a byte order mark": b"\xef\xbb\xbf" + b"i" * 98 + b"\n" + b"i" * 98 + b"\n",
        **{f"U+{ord(mark):04X}": b"j" * 60 + mark.encode() + b"k" * 60 + b"\n" for mark in SEPARATORS},
        "near the limit": near_the_limit(),
    }


def read_with_tensorflow(content: bytes) -> tuple[list[bytes], list[bytes]]:
    """Returns all lines, and those that the filter of the published program keeps."""
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines")
        path.write_bytes(content)
        lines = tf.data.TextLineDataset(str(path))
        kept = lines.filter(lambda line: tf.strings.length(line) > 100)
        return [line.numpy() for line in lines], [line.numpy() for line in kept]


if __name__ == "__main__":
    import tensorflow

    cases = {}
    for name, content in adversarial_files().items():
        lines, kept = read_with_tensorflow(content)
        cases[name] = {"read": len(lines), "kept": [line.decode("latin-1") for line in kept]}
    json.dump({"tensorflow": tensorflow.__version__, "cases": cases}, sys.stdout, indent=1)
    sys.stdout.write("\n")
