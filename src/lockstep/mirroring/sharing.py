"""The workers among whom an optimizer's state is divided, and how all of them get what each has of something.

    worker 0   [ own | .   | .   ]                            [ 0 | 1 | 2 ]
    worker 1   [ .   | own | .   ]   -- window by window -->  [ 0 | 1 | 2 ]
    worker 2   [ .   | .   | own ]                            [ 0 | 1 | 2 ]

A window is a few megabytes, so that nobody needs room for a second copy of what is gathered.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.collectives.communicator import Workers
from lockstep.collectives.process_group import Group
from lockstep.mirroring.shares import Piece, Shares, window


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Who shares.

    Args:
        workers: those who hold the same weights; each keeps the state of a share of them.
        stream: the connection among them, for this optimizer's shares alone.
        window_bytes: how much travels at a time, of all together.
        kinds: per parameter, what it is like: parameters of one kind are divided by themselves.
    """

    workers: Workers
    stream: Group
    window_bytes: int
    kinds: Sequence[Hashable]

    def fill(self, shares: Shares, flats: Mapping[int, torch.Tensor], what: str) -> None:
        """Writes into every worker's ``flats`` what the owners have of them. All workers must call it.

        Args:
            shares: the pieces of each worker.
            flats: by the number of a parameter, flat tensors of one dtype and device, each with what is this worker's
                own in place. Others than these are passed over; they are the same ones on all workers.
            what: for the message, should a worker be lost.
        """
        present = [tuple(piece for piece in own if piece.parameter in flats) for own in shares]
        longest = max(sum(piece.size for piece in own) for own in present)
        if not longest:
            return
        home = next(iter(flats.values()))
        length = min(longest, max(1, self.window_bytes // home.element_size() // len(shares)))
        room = home.new_empty(len(shares) + 1, length)
        for begin in range(0, longest, length):
            end = min(begin + length, longest)
            self._fill_window(present, flats, begin, list(room[:, : end - begin].unbind()), what)

    def _fill_window(
        self,
        present: Sequence[Sequence[Piece]],
        flats: Mapping[int, torch.Tensor],
        begin: int,
        room: list[torch.Tensor],
        what: str,
    ) -> None:
        sent, *received = room
        parts = [list(window(own, begin, begin + len(sent))) for own in present]
        mine = self.workers.index
        _copy(_views(sent, parts[mine]), _of(flats, parts[mine]))
        self.stream.wait(self.stream.start_gather(sent, received), what)
        for owner, others in enumerate(parts):
            if owner != mine:
                _copy(_of(flats, others), _views(received[owner], others))


def _of(flats: Mapping[int, torch.Tensor], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    return [flats[piece.parameter][piece.start : piece.stop] for piece in pieces]


def _views(room: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Where the pieces stand in a window, one behind the other."""
    sizes = [piece.size for piece in pieces]
    return list(room[: sum(sizes)].split(sizes))  # type: ignore[no-untyped-call]


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)
