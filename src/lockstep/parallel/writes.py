"""What initialising a module writes: seen without doing it, or done for one tensor of the model alone.

torch's functions for initial weights write into tensors that are there. On the meta device, where tensors have a shape
and no memory, the same calls cost nothing and tell which tensors a module's own way of initialising is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_OVERWRITING = frozenset(
    f"aten::{name}"
    for name in ("normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "bernoulli_", "exponential_")
)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what runs in it from writing into any tensor of a model but one, and notes what it writes, or would.

    Args:
        tensors: those of the model, by name; each has its own storage.
        only: the name of the one that may be written; None for none.
    """

    def __init__(self, tensors: Mapping[str, Tensor], only: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_storage(tensor): name for name, tensor in tensors.items()}
        self._only = only
        self._overwritten: dict[str, int] = {}
        self._adjusted: set[str] = set()

    @property
    def written(self) -> frozenset[str]:
        """The names of all tensors that are written, in part at least."""
        return frozenset(self._adjusted | self._overwritten.keys())

    def overwritten(self, name: str) -> int:
        """How many numbers of a tensor are written whatever they were, before any is made from what it was."""
        return self._overwritten.get(name, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        targets = list(_targets(func, args, kwargs or {}))
        named = [(name, each) for each in targets if (name := self._names.get(_storage(each))) is not None]
        for name, target in named:
            self._note(func, name, target)
        if any(name != self._only for name, _ in named):
            return targets[0]  # as what writes in place does
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, name: str, target: Tensor) -> None:
        if func._schema.name not in _OVERWRITING:
            self._adjusted.add(name)
        elif name not in self._adjusted:
            self._overwritten[name] = self._overwritten.get(name, 0) + target.numel()


def _targets(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator of torch writes into."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors({**given, **kwargs}.get(argument.name))


def _tensors(value: Any) -> Iterable[Tensor]:
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    """A number for what a tensor shares with its views, and with nothing else while it is there."""
    return int(tensor.untyped_storage()._cdata)
