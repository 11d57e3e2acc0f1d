"""What a worker says when it comes to an exchange: a record of fixed size, and the comparison of all workers' records.

Before any values move, every worker learns what every other one is about to do; so workers that are at different
calls, or were handed different data, are found there, and not by messages of the wrong length. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import CollectiveError, ConfigError

MOST_NUMBERS = 16
TEXT_BYTES = 336
_LAYOUT = struct.Struct(f"<QQQIII{MOST_NUMBERS}d{TEXT_BYTES}s")
RECORD_BYTES = _LAYOUT.size
_BETWEEN = "\n"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One worker's side of an exchange.

    Args:
        name: the call; equal on all workers.
        where: the line of the program that made it, for messages.
        sequence: how many exchanges there were before.
        numbers: values for all.
        length: of the payload that follows, in bytes.
        wishes: bits of ``Wish``.
        digest: of what must be equal on all workers, 64 bits.
    """

    name: str
    where: str = ""
    sequence: int = 0
    numbers: tuple[float, ...] = ()
    length: int = 0
    wishes: int = 0
    digest: int = 0

    def pack(self) -> bytes:
        """The record as ``RECORD_BYTES`` bytes; a long text loses its end, and a long name that of ``where`` too.

        Raises:
            ConfigError: more than ``MOST_NUMBERS`` numbers.
        """
        if len(self.numbers) > MOST_NUMBERS:
            raise ConfigError(f"an exchange carries at most {MOST_NUMBERS} numbers, got {len(self.numbers)}")
        text = f"{self.name}{_BETWEEN}{self.where}".encode()[:TEXT_BYTES]
        numbers = (*self.numbers, *[0.0] * (MOST_NUMBERS - len(self.numbers)))
        return _LAYOUT.pack(self.sequence, self.digest, self.length, self.wishes, len(self.numbers), 0, *numbers, text)

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        """The record that was packed."""
        sequence, digest, length, wishes, count, _, *numbers, text = _LAYOUT.unpack(data)
        name, _, where = text.rstrip(b"\0").decode(errors="replace").partition(_BETWEEN)
        return cls(
            name=name,
            where=where,
            sequence=sequence,
            numbers=tuple(numbers[:count]),
            length=length,
            wishes=wishes,
            digest=digest,
        )


def check_met(records: Sequence[Record], workers: Sequence[str]) -> None:
    """Checks that all workers came to the same call, with the same data behind them.

    Args:
        records: one per worker, in worker order.
        workers: how they are called in messages.

    Raises:
        CollectiveError: they did not; it says which worker is where.
    """
    calls = {(record.name, record.sequence, len(record.numbers)) for record in records}
    if len(calls) > 1:
        places = "; ".join(f"{worker} is at {_place(record)}" for worker, record in zip(workers, records, strict=True))
        raise CollectiveError(
            f"the workers did not meet at the same call: {places}. Every worker must run the same program on data of "
            "the same length, and none may leave out a call that others make"
        )
    odd = _odd_one([record.digest for record in records])
    if odd is not None:
        reference = 0 if odd else 1
        raise CollectiveError(
            f"{workers[odd]} was handed other data, or has other weights, optimizer settings or frozen parameters, "
            f"than {workers[reference]} before {_place(records[odd])}; give every worker the same data in the same "
            'order (seed what shuffles it), or distribute it with shard="file" or "off" where each worker has its '
            "own, and change weights and settings on every worker alike"
        )


def _place(record: Record) -> str:
    where = f" ({record.where})" if record.where else ""
    return f"{record.name!r}{where}, its exchange {record.sequence}"


def _odd_one(values: Sequence[int]) -> int | None:
    """The first of the values that differs from the most frequent one; from the first one where none is."""
    if len(set(values)) == 1:
        return None
    usual = max(values, key=lambda value: (values.count(value), value == values[0]))
    return next(index for index, value in enumerate(values) if value != usual)
