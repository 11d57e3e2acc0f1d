"""The arguments of a call by the names of ``forward``'s parameters, in whatever form they were given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.errors import DataError

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Arguments:
    """What a ``forward`` takes.

    Args:
        forward: a function, or a bound method.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = inspect.signature(forward).parameters.values()
        self._by_place = tuple(each.name for each in parameters if each.kind in _BY_PLACE)
        self._names = frozenset(each.name for each in parameters if each.kind in _BY_NAME)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that a call gives, by name; of more positional ones than there are names, those that have one.

        Example:
            >>> Arguments(lambda x, mask=None: x).named([1], {"mask": 2})
            {'x': 1, 'mask': 2}
        """
        return {**dict(zip(self._by_place, args, strict=False)), **kwargs}

    def of_inputs(self, x: Any) -> dict[str, Any]:
        """The inputs of a batch by name: of a dict, of a tuple or list of positional ones, or of a single one.

        Raises:
            DataError: an input that has no parameter, or two for one.
        """
        if isinstance(x, Mapping):
            named = {str(name): value for name, value in x.items()}
            unknown = sorted(named.keys() - self._names)
        else:
            args = x if isinstance(x, (tuple, list)) else (x,)
            named = self.named(args, {})
            unknown = [f"positional input {number + 1}" for number in range(len(named), len(args))]
        if unknown:
            raise DataError(
                f"the model's inputs have {', '.join(unknown)}, which its forward does not name; it takes "
                f"{', '.join(self._by_place)}"
            )
        return named
