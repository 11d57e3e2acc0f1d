"""Optimizer state sharded among workers (ZeRO stage 1; Rajbhandari et al. 2020).

    summed gradients on all workers -> each updates its own pieces -> all workers get the weights of all pieces

A piece is a parameter over some elements of a weight. The user's optimizer has the state of this worker's pieces. The
whole state, as an unsharded optimizer has it, exists only while it is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep._torch_compat import foreach_copy_
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.collectives.process_group import ProcessGroup

CUT_AT = 64
"""A parameter is cut at multiples of it: what torch computes as vectors in the whole, it then does in a piece too."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The elements from ``start`` to before ``stop``, in row-major order, of the parameter with this number."""

    parameter: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


Shares = tuple[tuple[Piece, ...], ...]
"""The pieces of each owner, in the order of the parameters."""


def divide_state(
    sizes: Sequence[int], owners: int, *, kinds: Sequence[Hashable] | None = None, uncut: Collection[int] = ()
) -> Shares:
    """Divides parameters among owners, evenly for each kind.

    Args:
        sizes: the elements of each parameter.
        owners: how many there are.
        kinds: parameters of one kind are divided separately, so that workers that hold the same ones beside others cut
            them at the same places; None is one kind.
        uncut: the numbers of parameters that one owner has whole.
    """
    of_kind: dict[Hashable, list[int]] = {}
    for number in range(len(sizes)):
        of_kind.setdefault(None if kinds is None else kinds[number], []).append(number)
    shares: list[list[Piece]] = [[] for _ in range(owners)]
    for members in of_kind.values():
        for pieces, additions in zip(shares, _divided(members, sizes, owners, uncut), strict=True):
            pieces += additions
    return tuple(tuple(sorted(pieces, key=lambda piece: piece.parameter)) for pieces in shares)


def window(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[Piece]:
    """The parts of an owner's consecutive pieces from element ``begin`` to before ``end``."""
    at = 0
    for piece in pieces:
        start, stop = max(begin - at, 0), min(end - at, piece.size)
        if start < stop:
            yield Piece(parameter=piece.parameter, start=piece.start + start, stop=piece.start + stop)
        at += piece.size


def _divided(members: Sequence[int], sizes: Sequence[int], owners: int, uncut: Collection[int]) -> list[list[Piece]]:
    total = sum(sizes[number] for number in members)
    shares: list[list[Piece]] = [[] for _ in range(owners)]
    before, owner = 0, 0
    for number in members:
        start, size = 0, sizes[number]
        while start < size:
            missing = total * (owner + 1) // owners - before - start  # until this owner has its part
            stop = size if owner == owners - 1 else start + _share_of(missing, size - start, cut=number not in uncut)
            if stop > start:
                shares[owner].append(Piece(parameter=number, start=start, stop=stop))
            start = stop
            if start < size:
                owner += 1
        before += size
    return shares


def _share_of(missing: int, size: int, *, cut: bool) -> int:
    """How many of the next ``size`` elements an owner takes that is ``left`` elements from its part."""
    if missing >= size:
        return size
    if not cut:
        return size if 2 * missing >= size else 0
    return min(size, max(0, -(-missing // CUT_AT) * CUT_AT))


@dataclass(frozen=True, kw_only=True)
class ShardingGroup:
    """The workers that hold the same weights, each of which keeps the state of a shard of them."""

    workers: Communicator
    stream: ProcessGroup  # for this optimizer's shards alone
    window_bytes: int  # how much is sent at a time, by all together
    kinds: Sequence[Hashable]  # of each parameter; those of one kind are divided separately

    def fill(self, shares: Shares, flats: Mapping[int, torch.Tensor], what: str) -> None:
        """Writes the owners' values into every worker's ``flats``. All workers must call it.

        ``flats`` are flat tensors of one dtype and device by the number of a parameter, the same ones on all workers.
        """
        present = [tuple(piece for piece in pieces if piece.parameter in flats) for pieces in shares]
        longest = max(sum(piece.size for piece in pieces) for pieces in present)
        if not longest:
            return
        home, this_owner = next(iter(flats.values())), self.workers.index
        length = min(longest, max(1, self.window_bytes // home.element_size() // len(shares)))
        buffer = home.new_empty(len(shares) + 1, length)
        # In windows: gathered at once, the buffer would be as large as all weights, which sharding has just saved.
        for begin in range(0, longest, length):
            end = min(begin + length, longest)
            outgoing, *incoming = buffer[:, : end - begin].unbind()
            parts = [list(window(pieces, begin, end)) for pieces in present]
            _copy(_views(outgoing, parts[this_owner]), _of(flats, parts[this_owner]))
            self.stream.wait(self.stream.start_all_gather(outgoing, incoming), what)
            for owner, part in enumerate(parts):
                if owner != this_owner:
                    _copy(_of(flats, part), _views(incoming[owner], part))


def _of(flats: Mapping[int, torch.Tensor], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    return [flats[piece.parameter][piece.start : piece.stop] for piece in pieces]


def _views(flat: torch.Tensor, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    sizes = [piece.size for piece in pieces]
    return list(flat[: sum(sizes)].split(sizes))  # type: ignore[no-untyped-call]


def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if into:
        foreach_copy_(into, values)


State = MutableMapping[Any, dict[str, Any]]
"""An optimizer's state: by parameter, by name."""


class ShardedOptimizer:
    """The pieces of one optimizer's parameters, which are the same on all workers. ``shares``: those of each worker."""

    def __init__(self, parameters: Sequence[nn.Parameter], sharing: ShardingGroup) -> None:
        self._parameters = tuple(parameters)
        self._sharing = sharing
        self.shares = divide_state(
            [parameter.numel() for parameter in parameters],
            sharing.workers.size,
            kinds=[(kind, parameter.requires_grad) for kind, parameter in zip(sharing.kinds, parameters, strict=True)],
            # Of a weight that is not contiguous (channels_last) no range of memory is a range of elements.
            uncut=[number for number, parameter in enumerate(parameters) if not parameter.is_contiguous()],
        )
        self._local: dict[int, list[tuple[Piece, nn.Parameter]]] = {id(parameter): [] for parameter in parameters}
        for piece in self.shares[sharing.workers.index]:
            whole = self._parameters[piece.parameter]
            part = whole
            if piece.size != whole.numel():
                part = nn.Parameter(_cut(whole.data, piece), requires_grad=whole.requires_grad)
            self._local[id(whole)].append((piece, part))

    def local_pieces(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """This worker's pieces of a parameter, or the parameter itself."""
        return [part for _, part in self._local[id(parameter)]]

    def pieces_of(self, parameter: nn.Parameter) -> list[tuple[int, nn.Parameter]]:
        """The same, each with the number of its first element in the parameter."""
        return [(piece.start, part) for piece, part in self._local[id(parameter)]]

    @contextmanager
    def ready(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside the block the own pieces of ``parameters`` use their memory and gradients."""
        pieces = [(whole, *pair) for whole in parameters for pair in self._local[id(whole)] if pair[1] is not whole]
        for whole, piece, part in pieces:
            # Views, so that the step of a piece writes the weight itself; new ones, since ``weight.data = x`` moves it.
            part.data = whole.data.view(-1)[piece.start : piece.stop]
            part.grad = None if whole.grad is None else _cut(whole.grad, piece)
        try:
            yield
        finally:
            # Else the views would keep the gradients' memory after zero_grad(set_to_none=True).
            for _, _, part in pieces:
                part.grad = None

    @torch.no_grad()
    def take_weights(self) -> None:
        """Takes the weights of all pieces that have gradients from their owners. All workers must call it."""
        stepped = {
            number: parameter.data for number, parameter in enumerate(self._parameters) if parameter.grad is not None
        }
        # Sorted: a set has no order, and all workers must exchange the dtypes in one.
        for dtype in sorted({weight.dtype for weight in stepped.values()}, key=str):
            weights = {number: weight for number, weight in stepped.items() if weight.dtype == dtype}
            flats = {number: weight.contiguous().view(-1) for number, weight in weights.items()}
            self._sharing.fill(self.shares, flats, "the exchange of updated weights")
            for number, weight in weights.items():
                if not weight.is_contiguous():
                    weight.copy_(flats[number].view(weight.shape))

    @torch.no_grad()
    def whole(self, state: State) -> dict[torch.Tensor, dict[str, Any]]:
        """The state as an unsharded optimizer has it, from that of the pieces, in new tensors. A collective."""
        entries = [
            (
                piece.parameter,
                piece.start,
                [_is_elementwise(value, part) for value in state[part].values()],
                state[part],
            )
            for whole in self._parameters
            for piece, part in self._local[id(whole)]
            if part in state
        ]
        states: dict[int, dict[str, Any]] = {}
        for entries_of_worker in all_gather_object(self._sharing.workers, "the optimizer's state", entries):
            for number, start, elementwise, values in entries_of_worker:
                whole, into = self._parameters[number], states.setdefault(number, {})
                for sharded, (name, value) in zip(elementwise, values.items(), strict=True):
                    if not sharded:
                        into[name] = value
                        continue
                    if name not in into:
                        into[name] = torch.empty(whole.shape, dtype=value.dtype, device=whole.device)
                    into[name].view(-1)[start : start + value.numel()] = value.reshape(-1).to(whole.device)
        return {self._parameters[number]: states[number] for number in sorted(states)}

    @torch.no_grad()
    def cut(self, state: State) -> None:
        """Keeps of a whole state what belongs to the own pieces, in place. Nothing is sent."""
        for whole in self._parameters:
            if whole not in state or any(part is whole for part in self.local_pieces(whole)):
                continue
            values = state.pop(whole)
            for piece, part in self._local[id(whole)]:
                state[part] = {
                    name: _cut(value, piece).clone() if _is_elementwise(value, whole) else value
                    for name, value in values.items()
                }


def _cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor.reshape(-1)[piece.start : piece.stop]


def _is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    """Whether every element of the parameter has its own value; all have the count of steps in common."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == parameter.shape
