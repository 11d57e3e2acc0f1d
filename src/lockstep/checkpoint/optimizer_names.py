"""Optimizers' states by the names of parameters: numbers follow the order in which an optimizer was given them.

One device's optimizer has all parameters, a pipeline's stage some; on each of them a parameter has the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.checkpoint.kinds import check_kind, check_like
from lockstep.checkpoint.nested import Stored
from lockstep.checkpoint.part import SavedPart
from lockstep.errors import CheckpointError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer

_SAVED: Any = {
    "kind": str,
    "state": {"state": dict[int, dict[str, Any]], "param_groups": [{"params": list[int]}]},
}
Names = list[list[str]]
"""Of each group the names of its parameters, in order."""


def kind_of(optimizer: Optimizer) -> str:
    """What the user's own optimizer is, such as "AdamW"."""
    return type(optimizer.plain if isinstance(optimizer, MirroredOptimizer) else optimizer).__name__


def prefixed(modules: Mapping[str, MirroredModule]) -> dict[str, MirroredModule]:
    """Mirrored modules by what the names of their parameters begin with, so that no two are called alike."""
    return {"" if len(modules) == 1 else f"{name}.": module for name, module in modules.items()}


def names_of(optimizer: Optimizer, modules: Mapping[str, MirroredModule]) -> Names | None:
    """The names of an optimizer's parameters; None where one belongs to none of the modules.

    Args:
        optimizer: mirrored or not.
        modules: as ``prefixed`` gives them.
    """
    known = {
        id(parameter): f"{prefix}{name}"
        for prefix, module in modules.items()
        for name, parameter in module.module.named_parameters()
    }
    found = [[known.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
    return found if all(name for group in found for name in group) else None


def check_state(shared: Any, optimizer: Optimizer) -> None:
    """Looks whether what was saved for an optimizer is of the kinds that ``OptimizerPart`` saves.

    Raises:
        DamagedStateError: it is not.
    """
    check_kind(shared, _SAVED, "the optimizer")
    check_kind(shared.get("names"), list[list[str]] | None, "the optimizer.names")
    state = shared["state"]
    if shared.get("names") is not None:
        for group, names in zip(state["param_groups"], shared["names"], strict=True):
            check_like(tuple(group["params"]), (0,) * len(names), "the optimizer.param_groups.params")
    if not _by_torch(optimizer):
        return
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        plain = {name: value for name, value in own.items() if name not in ("params", "param_names")}
        check_like(saved, plain, "the optimizer.param_groups")
    kinds: dict[str, Any] = {}
    for number, values in state["state"].items():
        for slot, value in values.items():
            kind = torch.Tensor if isinstance(value, (torch.Tensor, Stored)) else type(value)
            check_kind(value, kinds.setdefault(slot, kind), f"the optimizer.state.{number}.{slot}")


def _by_torch(optimizer: Optimizer) -> bool:
    plain = optimizer.plain if isinstance(optimizer, MirroredOptimizer) else optimizer
    return type(plain).__module__.startswith("torch.")


def check_class(saved: SavedPart, optimizer: Optimizer) -> None:
    """An optimizer's state fits one of the same class with as many groups.

    Raises:
        CheckpointError: another class, or another number of groups.
    """
    kind, groups = saved.shared["kind"], saved.shared["state"]["param_groups"]
    if kind != kind_of(optimizer) or len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{saved.source} has for {saved.name!r} the state of a {kind} with {len(groups)} groups, but it is a "
            f"{kind_of(optimizer)} with {len(optimizer.param_groups)}; make the optimizer as it was when that was saved"
        )


def by_name(shared: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What an optimizer has saved for each parameter that it has a state for."""
    state = shared["state"]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    names = [name for group in shared["names"] for name in group]
    pairs = zip(numbers, names, strict=True)
    return {name: state["state"][number] for number, name in pairs if number in state["state"]}


def in_order(shared: Mapping[str, Any], names: Names | None) -> dict[str, Any]:
    """A saved state_dict with its numbers changed to an optimizer's own order.

    Args:
        shared: what was saved.
        names: of the optimizer that takes it; where these, or those of the other, are not known, or not the same, the
            order stays.
    """
    state: dict[str, Any] = shared["state"]
    theirs = shared.get("names")
    if names is None or theirs is None or names == theirs or not _same(names, theirs):
        return state
    values = by_name(shared)
    ours = [name for group in names for name in group]
    numbers = iter(range(len(ours)))
    return {
        "state": {number: values[name] for number, name in enumerate(ours) if name in values},
        "param_groups": [
            {**group, "params": [next(numbers) for _ in own]}
            for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }


def _same(ours: Sequence[Iterable[str]], theirs: Sequence[Iterable[str]]) -> bool:
    return [set(group) for group in ours] == [set(group) for group in theirs]
