"""The optimizer and the scheduler that ``compile`` was given, or made from the functions that it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.module import MirroredModule

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerLike = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]


def make_optimizer(given: OptimizerLike, module: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer itself, or what the function makes of the module's parameters.

    Raises:
        ConfigError: neither an optimizer nor a function that makes one.
    """
    made = given if isinstance(given, torch.optim.Optimizer) or not callable(given) else given(module.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(made).__name__}; give a torch optimizer over module.parameters(), "
            "or a function of the parameters that makes one"
        )
    return made


def make_scheduler(given: SchedulerLike | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The scheduler itself, or what the function makes of the optimizer.

    Raises:
        ConfigError: neither a scheduler nor a function that makes one, one of another optimizer, or one that cannot be
            stepped per update.
    """
    if given is None:
        return None
    made: Any = given if isinstance(given, LRScheduler) or not callable(given) else given(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "scheduler is a ReduceLROnPlateau, which steps by a metric; fit steps schedulers once per update: "
            "choose another, or step it in a callback's on_epoch_end"
        )
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            f"scheduler is a {type(made).__name__}; give a torch scheduler of the optimizer, "
            "or a function of the optimizer that makes one"
        )
    _check_optimizer(made, optimizer)
    return made


def check_trained(
    optimizer: torch.optim.Optimizer, module: MirroredModule, loss: object, mirrored: Sequence[MirroredModule]
) -> None:
    """Finds an optimizer of another network, as a notebook's cell leaves that is run again.

    Args:
        optimizer: over parameters of mirrored modules.
        module: that is trained, and called in every step.
        loss: called there too; may be a mirrored module itself, with parameters of its own.
        mirrored: all modules of the strategy.

    Raises:
        UsageError: the optimizer holds parameters of another module than these.
    """
    trained = [module, loss] if isinstance(loss, MirroredModule) else [module]
    own = {id(parameter) for each in trained for parameter in each.parameters()}
    others = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
    if not others:
        return
    owners = [(each, name) for each in mirrored for name, part in each.named_parameters() if part is others[0]]
    kind, name = (type(owners[0][0].module).__name__, owners[0][1]) if owners else ("module", "a parameter")
    raise UsageError(
        f"the optimizer holds {len(others)} parameters that are not the model's, such as {name!r} of shape "
        f"{tuple(others[0].shape)} of another {kind}; make a new optimizer from this module's parameters, or give "
        "compile a function of them that makes one"
    )


def check_loss(optimizer: torch.optim.Optimizer, module: MirroredModule, loss: object) -> None:
    """Finds weights of the loss's own that nothing would train, or every replica for itself.

    Args:
        optimizer: that ``fit`` will use.
        module: that is trained, whose parameters the loss may hold too.
        loss: as it was given to ``compile``.

    Raises:
        UsageError: a plain module with parameters that ask for gradients, or a mirrored one with some that the
            optimizer does not hold.
    """
    while isinstance(loss, (partial, MethodType)):
        loss = loss.func if isinstance(loss, partial) else loss.__self__
    if not isinstance(loss, torch.nn.Module):
        return
    others = {id(parameter) for parameter in module.parameters()}
    own = {name: each for name, each in loss.named_parameters() if each.requires_grad and id(each) not in others}
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    missing = [name for name, each in own.items() if id(each) not in held]
    if not isinstance(loss, MirroredModule) and own:
        raise UsageError(
            f"the loss is a {type(loss).__name__} with trained parameters of its own, such as {next(iter(own))!r}, of "
            "which every replica needs a copy; in the strategy's scope call loss = strategy.mirror(loss), make the "
            "optimizer from the parameters of the module and of the loss, and give both to compile; if the loss is not "
            "to be trained, call loss.requires_grad_(False)"
        )
    if missing:
        kind = type(loss.module if isinstance(loss, MirroredModule) else loss).__name__
        raise UsageError(
            f"the loss is a {kind} with trained parameters of its own that the optimizer does not hold, such as "
            f"{missing[0]!r}; make the optimizer from the parameters of the module and of the loss, or call "
            "loss.requires_grad_(False) if the loss is not to be trained"
        )


def _check_optimizer(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    # A mirrored optimizer shares the list of groups with the plain one, so a scheduler of either is right.
    if scheduler.optimizer.param_groups is not optimizer.param_groups:
        raise ConfigError(
            f"scheduler is a {type(scheduler).__name__} of another optimizer, and would leave this one's learning rate "
            "as it is; make it from the optimizer given to compile"
        )
