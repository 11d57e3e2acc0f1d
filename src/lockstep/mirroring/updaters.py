"""The optimizers under a mirrored one: one per storage of the weights, each able to update a slice on its own.

The first is the user's own; the others are copies of it for the other storages, given the user's hyperparameters
before every update, so that a scheduler on the user's optimizer reaches them all.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.errors import UsageError
from lockstep.mirroring.plain_step import IN_LOCKSTEP, refuse_plain_step

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip


class Updaters:
    """The user's optimizer and its copies for the other storages.

    Args:
        optimizer: the user's, over the first leader's parameters.
        parameters: per parameter its copies, one per replica.
        leaders: the replicas that lead a storage group, replica 0 first.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[Sequence[nn.Parameter]], leaders: Sequence[int]
    ) -> None:
        self.plain = optimizer
        self._parameters = parameters
        self._leaders = tuple(leaders)
        self.reset()

    @property
    def divisible(self) -> bool:
        """Whether parameters can be updated in slices: torch's elementwise optimizers, without hooks on the step."""
        hooks = (
            self.plain._optimizer_step_pre_hooks,
            self.plain._optimizer_step_post_hooks,
            [hook for hook in _global_optimizer_pre_hooks.values() if hook is not refuse_plain_step],
            _global_optimizer_post_hooks,
        )
        return type(self.plain) in ELEMENTWISE and not any(hooks)

    def reset(self) -> None:
        """Makes the copies anew, with the state that the user's optimizer has now (after load_state_dict)."""
        self._state = self.plain.state
        self._by_leader: dict[int, Optimizer] = {self._leaders[0]: self.plain}
        for leader in self._leaders[1:]:
            memo: dict[int, Any] = {id(copies[0]): copies[leader] for copies in self._parameters}
            duplicate = copy.deepcopy(self.plain, memo)
            for copies in self._parameters:
                for name, value in duplicate.state.get(copies[leader], {}).items():
                    if isinstance(value, torch.Tensor) and value.device == copies[0].device and value.ndim:
                        duplicate.state[copies[leader]][name] = value.to(copies[leader].device)
            self._by_leader[leader] = duplicate

    def align(self) -> None:
        """Gives the copies the user's hyperparameters, and notes for schedulers that a step has been taken.

        Raises:
            UsageError: the user's optimizer got parameters that the mirrored one does not know.
        """
        known = sum(len(group["params"]) for group in self.plain.param_groups)
        if known != len(self._parameters):
            raise UsageError(
                f"the optimizer has {known} parameters, but had {len(self._parameters)} when it was mirrored; "
                "add groups with add_param_group of the mirrored optimizer"
            )
        if self.plain.state is not self._state:  # the user loaded a state_dict into the plain optimizer
            self.reset()
        for duplicate in list(self._by_leader.values())[1:]:
            for theirs, ours in zip(duplicate.param_groups, self.plain.param_groups, strict=True):
                theirs.update({name: value for name, value in ours.items() if name != "params"})
        self.plain._opt_called = True  # type: ignore[attr-defined]  # what LRScheduler looks for

    def step(self, leader: int) -> None:
        """Updates all parameters of the leader's storage."""
        self._by_leader[leader].step()

    def step_slice(self, leader: int, chosen: Sequence[nn.Parameter]) -> None:
        """Updates only ``chosen`` of the leader's storage; disjoint slices may be updated at the same time."""
        optimizer = self._by_leader[leader]
        wanted = {id(parameter) for parameter in chosen}
        # Shares the state. Not copy.copy, whose __setstate__ walks through the state of all parameters while other
        # threads are still making theirs: NAdam then found one half made.
        part = object.__new__(type(optimizer))
        part.__dict__.update(optimizer.__dict__)
        part.__dict__[IN_LOCKSTEP] = True
        part.param_groups = [
            {**group, "params": [parameter for parameter in group["params"] if id(parameter) in wanted]}
            for group in optimizer.param_groups
        ]
        type(optimizer).step(part)
