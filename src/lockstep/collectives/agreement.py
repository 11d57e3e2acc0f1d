"""What all workers must have alike before they begin: compared line by line, and the first difference named."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from lockstep.collectives.workers import Workers
from lockstep.errors import ClusterError


def agree(workers: Workers, what: str, lines: Sequence[str]) -> None:
    """Checks that every worker has the same ``lines``. Every worker must call it; all raise the same error.

    Args:
        workers: this worker's view of all.
        what: what the lines describe, for the message: "the model".
        lines: texts without line breaks.

    Raises:
        ClusterError: a worker has other lines than the chief.
    """
    if workers.alone:
        return
    everyones = [text.decode().split("\n") for text in workers.exchange_bytes(f"agree on {what}", _joined(lines))]
    for worker, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            pairs = zip_longest(everyones[0], theirs, fillvalue="nothing more")
            chiefs, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ClusterError(
                f"the workers disagree about {what}: {workers.names[0]} has {chiefs or 'nothing'}, "
                f"{workers.names[worker]} has {other or 'nothing'}; run the same program with the same arguments on "
                "every worker"
            )


def _joined(lines: Sequence[str]) -> bytes:
    return "\n".join(lines).encode()
