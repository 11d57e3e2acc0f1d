"""What a step sets on the module: an output added to a list, a count, the last loss. One device has it for all rows.

    self.outputs.append(loss)      the items that all replicas add are joined, in all copies
    self.seen += len(x)            the changes are added up or averaged, as the comparison of halves shows
    self.last = logits             joined as what steps return

Dicts, and lists of lists, stay each replica's own, which is warned of; so do objects that a step changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.integrations.lightning.joined import joined
from lockstep.integrations.lightning.values import Part, combined

Place = tuple[int, str]
"""The number of a module among those that are watched, and the name of an attribute."""
_PLAIN = (int, float, str, bool, tuple, type(None), Tensor)


@dataclass(frozen=True)
class Change:
    """What one replica's step has made of an attribute.

    Attributes:
        kind: "items" were added to a list, a "number" was set, or a "value" of another type.
        value: the items, by how much the number has changed, or the value.
    """

    kind: str
    value: Any


class AttributeWatch:
    """Looks at the attributes of the parts of one copy before and after a step.

    Args:
        parts: the modules with the attributes.
        ignored: names of Lightning's own.
        containers: whether dicts and lists of lists are looked at too, which takes time for each of their items.
    """

    def __init__(self, parts: Sequence[nn.Module], ignored: frozenset[str], *, containers: bool = False) -> None:
        self._parts, self._ignored = parts, ignored
        self._before = {place: self._noted(value) for place, value in self._present()}
        self._containers = [
            (name, value, _snapshot(value), _signature(value))
            for part in (parts if containers else ())
            for name, value in vars(part).items()
            if name not in ignored and _is_nested(value)
        ]

    def _present(self) -> list[tuple[Place, Any]]:
        return [
            ((number, name), value)
            for number, part in enumerate(self._parts)
            for name, value in vars(part).items()
            if name not in self._ignored and isinstance(value, (list, *_PLAIN))
        ]

    @staticmethod
    def _noted(value: Any) -> tuple[Any, int]:
        if isinstance(value, list):
            return value, len(value)
        return value, value._version if isinstance(value, Tensor) and not value.is_inference() else 0

    def changes(self) -> dict[Place, Change]:
        """What has changed since the watch was made."""
        changes: dict[Place, Change] = {}
        for place, value in self._present():
            former, mark = self._before.get(place, (None, 0))
            if isinstance(value, list) and value is former:
                if len(value) > mark:
                    changes[place] = Change("items", value[mark:])
            elif value is former and self._noted(value)[1] == mark:
                continue
            elif _is_number(value) and (former is None or _is_number(former)) and value is not former:
                changes[place] = Change("number", value - (former if former is not None else 0))
            elif not _is_equal(value, former):
                changes[place] = Change("value", value)
        return changes

    def changed_containers(self) -> list[str]:
        """The names of the dicts and lists of lists that have changed since the watch was made."""
        return [name for name, value, _, before in self._containers if _signature(value) != before]

    def undo(self) -> None:
        """Brings the attributes to what they were, but for what was written into tensors."""
        for _, value, before, _ in self._containers:
            _restore(value, before)
        for place, value in self._present():
            if place not in self._before:
                del vars(self._parts[place[0]])[place[1]]
            elif isinstance(value, list) and value is self._before[place][0]:
                del value[self._before[place][1] :]
        for (number, name), (value, _) in self._before.items():
            vars(self._parts[number])[name] = value

    def apply(self, changes: Mapping[Place, Change], device: torch.device) -> None:
        """Gives the copy the changes of the batch."""
        for (number, name), change in changes.items():
            former, mark = self._before.get((number, name), (None, 0))
            value = _on_device(change.value, device)
            if change.kind == "items":
                former[mark:] = value
            elif change.kind == "number":
                vars(self._parts[number])[name] = value + former if former is not None else value
            else:
                vars(self._parts[number])[name] = value


def joined_changes(
    changes: Sequence[Mapping[Place, Change]], rows: Sequence[int], rules: Mapping[str, str], device: torch.device
) -> dict[Place, Change]:
    """The changes that one device makes, of those of the shards with rows. Raises UsageError if that is not known."""
    result: dict[Place, Change] = {}
    for place in dict.fromkeys(place for shard in changes for place in shard):
        pairs = [(shard[place], count) for shard, count in zip(changes, rows, strict=True) if place in shard]
        kinds, what = {change.kind for change, _ in pairs}, f"self.{place[1]}"
        if len(kinds) > 1 or (kinds == {"items"} and len({len(change.value) for change, _ in pairs}) > 1):
            raise UsageError(
                f"the step changes {what} in each replica in another way; return what it computes, or log it"
            )
        counts = [count for _, count in pairs]
        kind, values = pairs[0][0].kind, [change.value for change, _ in pairs]
        if kind == "number":
            result[place] = Change(kind, _joined_number(place, changes, rows, rules.get(what), device))
        elif kind == "items":
            columns = enumerate(zip(*values, strict=True))
            result[place] = Change(kind, [joined(column, counts, device, f"{what}[{at}]") for at, column in columns])
        else:
            result[place] = Change(kind, joined(values, counts, device, what))
    return result


def _joined_number(
    place: Place, changes: Sequence[Mapping[Place, Change]], rows: Sequence[int], rule: str | None, device: torch.device
) -> Tensor | float:
    """The change of a number. A shard that leaves it as it was changes it by 0.

    As long as no comparison has shown a rule, whole numbers that differ are counts of rows, and are added up.
    """
    values = [shard[place].value if place in shard else 0 for shard in changes]
    whole = all(
        isinstance(value, int) or (isinstance(value, Tensor) and not value.is_floating_point()) for value in values
    )
    differ = any(float(value) != float(values[0]) for value in values)
    parts = [Part(value=value, rows=count) for value, count in zip(values, rows, strict=True)]
    parts.sort(key=lambda part: not isinstance(part.value, Tensor))  # the first one tells whether it is a tensor
    return combined(rule or ("sum" if whole and differ else "rows"), parts, device)


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, (dict, list)) for item in value)
    return isinstance(value, dict)


_DEPTH = 4
"""Of containers in containers that are looked at: a deeper one may well hold itself."""


def _snapshot(value: Any, depth: int = _DEPTH) -> Any:
    """The items of a dict or list, and of those in it, as they are now."""
    if not depth:
        return None
    if isinstance(value, dict):
        return [(key, item, _snapshot(item, depth - 1)) for key, item in value.items()]
    return [(item, _snapshot(item, depth - 1)) for item in value] if isinstance(value, list) else None


def _restore(value: Any, before: Any) -> None:
    """Gives a dict or list the items of a snapshot."""
    if before is None:
        return
    if isinstance(value, dict):
        value.clear()
        value.update((key, item) for key, item, _ in before)
    else:
        value[:] = [item for item, _ in before]
    for *_, item, inner in before:
        _restore(item, inner)


def _signature(value: Any, depth: int = _DEPTH) -> Any:
    """What differs once a dict or list, or one in it, has changed."""
    if isinstance(value, dict) and depth:
        return [(key, _signature(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, list) and depth:
        return [_signature(item, depth - 1) for item in value]
    return value if isinstance(value, (int, float, str, bool)) else id(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.ndim and value.dtype != torch.bool
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_equal(value: Any, former: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(former, Tensor):
        return False
    return bool(type(value) is type(former) and value == former)


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _on_device(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([_on_device(item, device) for item in value])
    return value
