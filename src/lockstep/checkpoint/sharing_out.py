"""Who writes what of tensors that several workers hold: each box is written once, and all write about as much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.checkpoint.held_tensors import HeldTensor
from lockstep.collectives.communicator import Workers, exchange_values


def share_out(workers: Workers, held: Mapping[str, Mapping[str, HeldTensor]]) -> dict[str, dict[str, HeldTensor]]:
    """What this worker writes of what it holds. Every worker must call it.

    Args:
        workers: all that write.
        held: by folder and key what this one holds.
    """
    listed = [
        [folder, key, list(box.offsets), list(box.sizes), box.elements]
        for folder, tensors in held.items()
        for key, each in tensors.items()
        for box in each.boxes
    ]
    own = writers(exchange_values(workers, "who writes what", listed), workers.index)
    found: dict[str, dict[str, HeldTensor]] = {}
    for folder, tensors in held.items():
        chosen = {
            key: each.only([box for box in each.boxes if (folder, key, box.offsets, box.sizes) in own])
            for key, each in tensors.items()
        }
        found[folder] = {key: each for key, each in chosen.items() if each.boxes}
    return found


def writers(everyones: list[list[list[Any]]], worker: int) -> set[tuple[Any, ...]]:
    """Of the boxes that all workers list, those that one of them writes: each is given to the holder with least so far.

    Args:
        everyones: of each worker (folder, key, offsets, sizes, elements), the same on all of them.
        worker: whose boxes are wanted.
    """
    holders: dict[tuple[Any, ...], list[int]] = {}
    weight: dict[tuple[Any, ...], int] = {}
    for number, listed in enumerate(everyones):
        for folder, key, offsets, sizes, elements in listed:
            box = (folder, key, tuple(offsets), tuple(sizes))
            holders.setdefault(box, []).append(number)
            weight[box] = elements
    so_far = [0] * len(everyones)
    own = set()
    for box, candidates in holders.items():
        writer = min(candidates, key=so_far.__getitem__)
        so_far[writer] += weight[box]
        if writer == worker:
            own.add(box)
    return own
