"""The text of a job of several workers: the chief reads it, and all have the same.

Eight workers that parse Python's own library at once keep two cores busy for ten seconds; one does so for two, and what
it found is 1.5 MB. Nor need a folder of text be on every host.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from lockstep.collectives.communicator import Workers
from lockstep.errors import DataError
from lockstep.recipes.text.splits import TextSplits


def text_for_all(read: Callable[[], TextSplits], workers: Workers) -> TextSplits:
    """What ``read`` gives on the chief. Every worker must call it.

    Raises:
        DataError: on every worker, where the chief's text cannot be used.
    """
    if workers.alone:
        return read()
    told = json.loads(workers.chiefs_bytes("the text", _said(read) if workers.is_chief else b""))
    if "refused" in told:
        raise DataError(told["refused"])
    return TextSplits(
        train=tuple(told["train"]), valid=tuple(told["valid"]), test=tuple(told["test"]), source=told["source"]
    )


def _said(read: Callable[[], TextSplits]) -> bytes:
    try:
        return json.dumps(asdict(read())).encode()
    except DataError as error:
        return json.dumps({"refused": str(error)}).encode()
