"""Structures of tensors and plain values between workers, and what the chief alone does for all.

Values travel as torch.save writes them and are read with ``weights_only``: nothing that is received can run code.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lockstep.collectives.workers import Workers
from lockstep.errors import ClusterError

R = TypeVar("R")


def exchange_values(workers: Workers, name: str, value: Any) -> list[Any]:
    """Gives every worker the values of all, in worker order, tensors on the CPU. Every worker must call it.

    Args:
        workers: this worker's view of all.
        name: what this call is for.
        value: tensors, numbers, texts and None in lists, tuples and dicts.
    """
    if workers.alone:
        return [value]
    written = io.BytesIO()
    torch.save(value, written)
    return [
        torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        for payload in workers.exchange_bytes(name, written.getvalue())
    ]


def on_chief(workers: Workers, name: str, act: Callable[[], R]) -> R | None:
    """Lets the chief act, and the others wait until it has. Every worker must call it.

    Returns:
        What ``act`` returned, on the chief; None on the others.

    Raises:
        Exception: on the chief, what ``act`` raised.
        ClusterError: on the others, what the chief could not do.
    """
    result, failed = None, None
    if workers.is_chief:
        try:
            result = act()
        except Exception as error:  # noqa: BLE001  it is raised below, when the others know of it
            failed = error
    told = b"" if failed is None else f"{type(failed).__name__}: {failed}".encode()
    message = workers.chiefs_bytes(name, told).decode()
    if failed is not None:
        raise failed
    if message:
        raise ClusterError(f"{workers.chief_name}, the chief, failed in {name!r} with {message}")
    return result
