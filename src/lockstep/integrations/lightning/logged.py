"""``self.log`` in the step of a replica: noted there, and given to Lightning once, with the value of the whole batch.

replica 0   self.log("loss", 0.7) --.
replica 1   self.log("loss", 0.3) ----> the rule of "loss" --> Lightning's results: 0.52, once, for all rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.integrations.lightning.values import FIRST_RULES, Part, candidates, combined

Key = tuple[str, int]
"""Names a value of a step: what was logged, and how often before in this step."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """One call of ``self.log`` in one replica."""

    hook: str
    name: str
    value: Any  # a number, a tensor without dimensions, or a metric
    count: float | None  # what the value is a mean over, if that was traced
    options: dict[str, Any]

    @property
    def assumed(self) -> str:
        """The rule of the value as long as no other is known."""
        name = str(self.options.get("reduce_fx", "mean")).lower()
        return FIRST_RULES.get("mean" if name == "avg" else name, "rows")

    @property
    def is_number(self) -> bool:
        return isinstance(self.value, (Tensor, int, float))

    def to_plain(self) -> dict[str, Any]:
        """The same for another worker, which has a metric of its own."""
        return {**vars(self), "value": self.value if self.is_number else None}

    def part(self, rows: int) -> Part:
        """The value as the part of a shard of so many rows."""
        return Part(value=self.value, rows=rows, count=self.count, batch_size=self.options.get("batch_size"))


@dataclass
class Recorder:
    """Stands in for Lightning's collection of results while a replica runs a step.

    ``count_of`` says what a value is a mean over, if that was traced.
    """

    count_of: Callable[[Any], float | None]
    calls: dict[Key, Logged] = field(default_factory=dict)

    def log(self, hook: str, name: str, value: Any, **options: Any) -> None:
        """Notes a value, with the arguments of Lightning's own method."""
        times = sum(other == name for other, _ in self.calls)
        count = self.count_of(value) if isinstance(value, Tensor) else None
        # Without functions, which other workers do not read: what they would do is done here.
        for option in ("sync_dist", "sync_dist_fn", "sync_dist_group"):
            options.pop(option, None)
        reduction = options.get("reduce_fx", "mean")
        options["reduce_fx"] = str(getattr(reduction, "__name__", reduction))
        self.calls[name, times] = Logged(hook=hook, name=name, value=value, count=count, options=options)

    def reset(self, *_: Any, **__: Any) -> None:
        """Lightning resets its own collection when the values are given to it."""


recorder: ContextVar[Recorder | None] = ContextVar("lockstep_lightning_log", default=None)
"""That of the replica whose step this thread runs; None outside steps."""


class _Connector:
    """What ``self.log`` asks Lightning's connector for in a replica."""

    _current_fx: str | None = None

    def should_reset_tensors(self, hook: str) -> bool:
        return False


class TrainerView:
    """The trainer as the module and its copies see it: in a step of a replica, logged values go to the recorder.

    It passes for the trainer, and is one object for all copies of the module.
    """

    def __init__(self, trainer: Any) -> None:
        object.__setattr__(self, "_trainer", trainer)

    @property
    def __class__(self) -> Any:
        return type(self._trainer)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise TypeError("the class of the trainer cannot be set")

    @property
    def plain(self) -> Any:
        """Lightning's own."""
        return self.__dict__["_trainer"]

    def __getattr__(self, name: str) -> Any:
        if name in ("_results", "_logger_connector") and (current := recorder.get()) is not None:
            return current if name == "_results" else _Connector()
        return getattr(self.__dict__["_trainer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerView:
        return self

    def __repr__(self) -> str:
        return repr(self._trainer)


def give(
    trainer: Any,
    calls: Sequence[Mapping[Key, Logged]],
    rows: Sequence[int],
    rules: Mapping[str, str],
    device: torch.device,
) -> None:
    """Logs the values of the batch, as the module would have on one device. Outside replicas.

    Args:
        trainer: Lightning's own.
        calls: those of each shard, in their order.
        rows: of each shard.
        rules: by the name of a value, where it is known.
        device: where the values are to be.
    """
    results, connector = trainer._results, trainer._logger_connector
    for key in dict.fromkeys(key for shard in calls for key in shard):
        pairs = [(shard[key], count) for shard, count in zip(calls, rows, strict=True) if key in shard]
        logged, _ = pairs[0]
        options, value = dict(logged.options), logged.value
        if value is None:
            value = trainer.lightning_module.get_submodule(options["metric_attribute"])
        if logged.is_number:
            parts = [call.part(count) for call, count in pairs]
            value = combined(rules.get(logged.name) or candidates(parts, logged.assumed)[0], parts, device)
            if options.get("batch_size") is not None:
                options["batch_size"] = sum(part.batch_size or 0 for part in parts)
        if connector.should_reset_tensors(logged.hook):
            results.reset(metrics=False, fx=logged.hook)
        results.log(logged.hook, logged.name, value, **options)
        connector._current_fx = logged.hook
