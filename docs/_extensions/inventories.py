"""Lists of names in other projects' documentation, for sphinx.ext.intersphinx, without a network.

A line of ``_inventories/python.txt`` has a name, its kind, and its address below the project's documentation, in which
``$`` is the name. The names are those that our reference uses; one that is in no list is shown without a link.
"""

from __future__ import annotations

import zlib
from pathlib import Path


def write_inventory(source: Path, target: Path) -> str:
    """Writes a list as an ``objects.inv`` of version 2, and returns its path."""
    lines = [line.split() for line in source.read_text("utf-8").splitlines()]
    body = "".join(f"{name} py:{kind} 1 {address} -\n" for name, kind, address in lines)
    head = (
        f"# Sphinx inventory version 2\n# Project: {source.stem}\n# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(head.encode() + zlib.compress(body.encode()))
    return str(target)
