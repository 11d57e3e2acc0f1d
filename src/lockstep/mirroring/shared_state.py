"""An optimizer whose state is divided among workers: each steps its share of the weights, then all take all shares.

    gradients, summed, on all workers -> step of the own pieces -> weights of all pieces on all workers

A piece is a parameter over some of a weight's elements. The state of the user's optimizer is that of the own pieces
alone; whole, as an undivided optimizer has it, it exists while it is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.collectives.communicator import exchange_values
from lockstep.mirroring.shares import Piece, divide_state
from lockstep.mirroring.sharing import Sharing

State = MutableMapping[Any, dict[str, Any]]
"""An optimizer's state: by parameter, by name."""
_Described = Mapping[int, Mapping[str, tuple[Any, str]]]
"""By the number of a parameter, by name: a value that is alike for all its elements, or the dtype of what each has."""


class SharedState:
    """The pieces of one optimizer's parameters.

    Args:
        parameters: in the optimizer's order, the same on all workers that share.
        sharing: those workers.

    Attributes:
        shares: the pieces of each worker.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sharing: Sharing) -> None:
        self._parameters = tuple(parameters)
        self._sharing = sharing
        self.shares = divide_state(
            [each.numel() for each in parameters],
            sharing.workers.size,
            kinds=[(kind, each.requires_grad) for kind, each in zip(sharing.kinds, parameters, strict=True)],
            uncut=[number for number, each in enumerate(parameters) if not each.is_contiguous()],
        )
        self._own: dict[int, list[tuple[Piece, nn.Parameter]]] = {id(each): [] for each in parameters}
        for piece in self.shares[sharing.workers.index]:
            whole = self._parameters[piece.parameter]
            self._own[id(whole)].append((piece, whole if piece.size == whole.numel() else _part(whole, piece)))

    def own(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """What is this worker's of a parameter: nothing, the parameter itself, or a piece of it."""
        return [part for _, part in self._own[id(parameter)]]

    def pieces_of(self, parameter: nn.Parameter) -> list[tuple[int, nn.Parameter]]:
        """The same, each with the number of its first element in the parameter."""
        return [(piece.start, part) for piece, part in self._own[id(parameter)]]

    @contextmanager
    def ready(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside the block the own pieces of ``parameters`` have these' memory and gradients."""
        pieces = [(whole, *pair) for whole in parameters for pair in self._own[id(whole)] if pair[1] is not whole]
        for whole, piece, part in pieces:
            part.data = whole.data.view(-1)[piece.start : piece.stop]
            part.grad = None if whole.grad is None else _cut(whole.grad, piece)
        try:
            yield
        finally:
            for _, _, part in pieces:
                part.grad = None

    @torch.no_grad()
    def take_weights(self) -> None:
        """Takes the weights of all pieces from those who have stepped them. All workers must call it.

        Those without a gradient have not been stepped, on any worker: gradients are summed.
        """
        stepped = {number: each.data for number, each in enumerate(self._parameters) if each.grad is not None}
        for dtype in sorted({each.dtype for each in stepped.values()}, key=str):
            weights = {number: each for number, each in stepped.items() if each.dtype == dtype}
            flats = {number: each.contiguous().view(-1) for number, each in weights.items()}
            self._sharing.fill(self.shares, flats, "the exchange of updated weights")
            for number, each in weights.items():
                if not each.is_contiguous():
                    each.copy_(flats[number].view(each.shape))

    @torch.no_grad()
    def whole(self, state: State) -> dict[torch.Tensor, dict[str, Any]]:
        """The state as an undivided optimizer has it, in tensors of its own. All workers must call it.

        Args:
            state: of the own pieces.
        """
        described = self._everyones(state)
        found = {number: {name: value for name, (value, _) in values.items()} for number, values in described.items()}
        divided = {(name, dtype) for values in described.values() for name, (_, dtype) in values.items() if dtype}
        for name, dtype in sorted(divided):
            numbers = [number for number, values in described.items() if values.get(name, (None, ""))[1] == dtype]
            flats = self._filled(state, name, dtype, numbers)
            for number in numbers:
                found[number][name] = flats[number].view(self._parameters[number].shape)
        return {self._parameters[number]: found[number] for number in sorted(found)}

    @torch.no_grad()
    def cut(self, state: State) -> None:
        """Keeps of a whole state what belongs to the own pieces, in place. Nothing is sent."""
        for whole in self._parameters:
            if whole not in state or any(part is whole for part in self.own(whole)):
                continue
            values = state.pop(whole)
            for piece, part in self._own[id(whole)]:
                state[part] = {
                    name: _cut(value, piece).clone() if _is_divided(value, whole) else value
                    for name, value in values.items()
                }

    def _everyones(self, state: State) -> _Described:
        """What there is of every parameter, of whichever worker's pieces."""
        own = {
            piece.parameter: {name: _described(value, part) for name, value in state[part].items()}
            for piece, part in self._pieces()
            if part in state
        }
        every = exchange_values(self._sharing.workers, "the optimizer's state", own)
        return {number: values for theirs in every for number, values in theirs.items()}

    def _filled(self, state: State, name: str, dtype: str, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """One name's whole tensors, flat."""
        flats = {
            number: torch.empty(each.numel(), dtype=getattr(torch, dtype), device=each.device)
            for number, each in ((number, self._parameters[number]) for number in numbers)
        }
        for piece, part in self._pieces():
            if piece.parameter in flats:
                flats[piece.parameter][piece.start : piece.stop] = state[part][name].reshape(-1)
        self._sharing.fill(self.shares, flats, "the exchange of the optimizer's state")
        return flats

    def _pieces(self) -> Iterator[tuple[Piece, nn.Parameter]]:
        for whole in self._parameters:
            yield from self._own[id(whole)]


def _part(whole: nn.Parameter, piece: Piece) -> nn.Parameter:
    return nn.Parameter(whole.data.view(-1)[piece.start : piece.stop], requires_grad=whole.requires_grad)


def _cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor.reshape(-1)[piece.start : piece.stop]


def _is_divided(value: Any, parameter: torch.Tensor) -> bool:
    """Whether every element of the parameter has its own; such as a count of steps all have in common."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == parameter.shape


def _described(value: Any, parameter: torch.Tensor) -> tuple[Any, str]:
    return (None, str(value.dtype).removeprefix("torch.")) if _is_divided(value, parameter) else (value, "")
