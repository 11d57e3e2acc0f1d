"""The logs of a batch whose numbers a device may still be computing: read when somebody asks for one.

To a callback they are a dict of floats. Who looks at no number does not make the loop wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lockstep.replicas.device.async_scalars import Arriving
from lockstep.train.running_loss import LossNow

Read = Callable[[], Mapping[str, float]]


class LateLogs(dict[str, float]):
    """A dict whose values are read together, at the first that is asked for.

    Args:
        names: the keys.
        read: gives the value of every name, the same ones whenever it is called.
        arrived: whether ``read`` would not wait.
    """

    def __init__(self, names: Sequence[str], read: Read, arrived: Callable[[], bool]) -> None:
        super().__init__(dict.fromkeys(names, float("nan")))
        self._names = tuple(names)
        self._read: Read | None = read
        self._unread = read
        self._arrived = arrived

    @property
    def arrived(self) -> bool:
        """Whether looking at a value does not wait."""
        return self._read is None or self._arrived()

    def own_copy(self) -> LateLogs:
        """Another dict of the same numbers, which is not read by this."""
        return LateLogs(self._names, self._unread, self._arrived)

    def __iter__(self) -> Iterator[str]:
        # Also has dict(logs) and {**logs} ask for the values one by one, instead of copying what stands here for them.
        return super().__iter__()

    def __reduce__(self) -> tuple[type[dict[str, float]], tuple[dict[str, float]]]:
        return dict, (dict(self),)

    def _fill(self) -> None:
        read, self._read = self._read, None
        if read is not None:
            dict.update(self, read())


def _filled(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def call(logs: LateLogs, *args: Any, **kwargs: Any) -> Any:
        logs._fill()
        return method(logs, *args, **kwargs)

    call.__name__ = name
    return call


# All that looks at a value, or changes what is there.
for _name in (
    *("__getitem__", "get", "items", "values", "pop", "popitem", "setdefault", "copy", "update", "clear"),
    *("__setitem__", "__delitem__", "__eq__", "__ne__", "__repr__", "__or__", "__ror__", "__ior__"),
):
    setattr(LateLogs, _name, _filled(_name))


def own_logs(logs: Mapping[str, float] | None) -> dict[str, float]:
    """A callback's own copy of the logs."""
    return logs.own_copy() if isinstance(logs, LateLogs) else dict(logs or {})


def batch_logs(loss: LossNow, names: Sequence[str], metrics: Arriving) -> dict[str, float]:
    """The logs of a batch: plain where everything is known.

    Args:
        loss: of the pass so far.
        names: of the metrics' values.
        metrics: those values.
    """

    def read() -> dict[str, float]:
        return {"loss": loss.value, **dict(zip(names, metrics.read(), strict=True))}

    def arrived() -> bool:
        return loss.arrived and metrics.arrived

    return read() if arrived() else LateLogs(["loss", *names], read, arrived)
