"""SLURM's short notation for hosts, "node[01-03,07],login": what ``scontrol show hostnames`` expands. Pure.

A range keeps the width of its first number, so that ``[08-10]`` is 08, 09, 10. A name may have several brackets, of
which the last runs fastest: ``rack[0-1]n[1-2]`` is rack0n1, rack0n2, rack1n1, rack1n2.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from lockstep.cluster.address import shown
from lockstep.errors import ClusterError

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")

# SLURM's own limit (MAX_RANGE in its hostlist.c): what is longer is taken for a slip, not expanded.
_MOST_HOSTS = 65536


def expand_hosts(text: str) -> tuple[str, ...]:
    """Every host of a list, in its order.

    Raises:
        ClusterError: an empty list or item, a bracket that is not closed, no range in one, a range that falls.
    """
    hosts = tuple(itertools.islice(_hosts(text), _MOST_HOSTS + 1))
    if len(hosts) > _MOST_HOSTS:
        raise ClusterError(f"{shown(text)} names more than {_MOST_HOSTS} hosts; name those of this job alone")
    return hosts


def _hosts(text: str) -> Iterator[str]:
    position, text = 0, text.strip()
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise _unreadable(text, text[position:] or "its end")
        yield from _expand_item(text, item[0])
        position = item.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise _unreadable(text, text[position:])
        position += 1


def _expand_item(text: str, item: str) -> Iterator[str]:
    choices = [
        [part[2]] if part[2] else [number for one in part[1].split(",") for number in _numbers(text, one)]
        for part in _PARTS.finditer(item)
    ]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _numbers(text: str, one: str) -> Iterator[str]:
    match = _RANGE.fullmatch(one)
    if match is None:
        raise _unreadable(text, one)
    first, last = match[1], match[2] or match[1]
    if not 0 <= int(last) - int(first) < _MOST_HOSTS:
        raise _unreadable(text, one)
    return (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _unreadable(text: str, part: str) -> ClusterError:
    return ClusterError(f"{shown(text)} is no list of hosts, at {shown(part)}; for example 'node[01-03,07],login1'")
