"""How the parameters are divided among replica threads for the exchange and the update: pure, on ints."""

from __future__ import annotations

from collections.abc import Sequence


def balance(sizes: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Divides items into ``parts`` of about equal total size, largest first to the least loaded (Graham's LPT rule).

    Args:
        sizes: one size per item.
        parts: how many parts, at least 1.

    Returns:
        The item numbers of each part in ascending order; parts may be empty. The same sizes give the same division.
    """
    loads = [0] * parts
    members: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        part = min(range(parts), key=lambda part: (loads[part], part))
        loads[part] += sizes[item]
        members[part].append(item)
    return tuple(tuple(sorted(part)) for part in members)
