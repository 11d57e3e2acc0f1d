"""What ``Model.compile`` makes of its arguments: the checked config, optimizer, scheduler, and mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.checks import ABOVE_ZERO, check_choice, check_kind, check_number
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.context import ReplicaContext
from lockstep.strategies.base import Strategy
from lockstep.train.metrics import check_metrics
from lockstep.train.string_identifiers import ModuleLoss, takes_tensors
from lockstep.train.user_step import UserStep

Loss = Callable[[Any, Any], Any]
PrecisionName = Literal["fp32", "bf16", "fp16"]
OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
SchedulerLike = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MEAN_LOSS_SCALE = 65536.0


class Precision:
    """What ``compile(precision=...)`` means on a kind of device, "cpu" or "cuda".

    Weights, gradients and the optimizer stay in the module's own dtype; autocast chooses the dtype of each operation.
    """

    def __init__(self, name: PrecisionName, device_type: str) -> None:
        self.name = name
        self._dtype = _AUTOCAST_DTYPES.get(name)
        self._device_type = device_type
        self.scaler: torch.amp.GradScaler | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is cast."""
        return self._dtype is None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass and the loss. It is thread-local, so each replica enters its own."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self._dtype)

    def scale(self, context: ReplicaContext, count: torch.Tensor | float) -> torch.Tensor | None:
        """The factor for the loss before backward; None without a scaler. Every replica must call it.

        The first call sums ``count``, this replica's count of the step. The factor is the scaler's own tensor, which an
        update may still be changing.
        """
        if self.name != "fp16":
            return None
        if self._scale is None:
            context.merge_call(lambda _strategy, counts: self._begin(context, counts), (count,))
        return self._scale

    @property
    def _scale(self) -> torch.Tensor | None:
        return None if self.scaler is None else self.scaler._get_scale_async()

    def state_dict(self) -> dict[str, Any]:
        """The gradient scaler's state; empty before the first step and without a scaler."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.scaler = torch.amp.GradScaler(self._device_type) if state else None
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state))

    def _begin(self, context: ReplicaContext, counts: Any) -> None:
        """Makes the scaler, if none was loaded, and its tensors, which its first use creates.

        Torch's default scale suits means. Sums are larger by the count: the first steps would overflow and be skipped.
        """
        if self.scaler is None:
            count = max(float(context.strategy.reduce("sum", counts)), 1.0)
            # A power of two, so that the scaling itself rounds nothing.
            scale = _MEAN_LOSS_SCALE / 2.0 ** math.ceil(math.log2(count))
            self.scaler = torch.amp.GradScaler(self._device_type, init_scale=scale)
        self.scaler.scale(torch.ones((), device=context.strategy.devices[0].torch_device))


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """The checked settings of ``Model.compile``, which describes them. Raises a ConfigError if one is not valid."""

    loss: Loss
    metrics: Mapping[str, Any] = field(default_factory=dict)
    precision: PrecisionName = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None
    graphs: bool = True
    combines_rows: bool = False

    def __post_init__(self) -> None:
        if not callable(self.loss) or isinstance(self.loss, type):
            kind = f"the class {self.loss.__name__}" if isinstance(self.loss, type) else f"a {type(self.loss).__name__}"
            raise ConfigError(
                f"loss is {kind}; give a function loss(outputs, targets), such as torch.nn.CrossEntropyLoss()"
            )
        check_choice("precision", self.precision, get_args(PrecisionName))
        check_number("accumulate", self.accumulate, least=1, whole=True, optional=False)
        check_number("clip_norm", self.clip_norm, least=ABOVE_ZERO, most=inf)
        check_kind("graphs", self.graphs, bool, "True to use CUDA graphs on a GPU, or False", optional=False)
        kinds = "True where rows are combined on purpose, or False"
        check_kind("combines_rows", self.combines_rows, bool, kinds, optional=False)
        object.__setattr__(self, "metrics", check_metrics(self.metrics))

    @cached_property
    def loss_takes_tensors(self) -> bool:
        """Whether the loss takes tensors: of outputs that have ``logits``, those."""
        return takes_tensors(self.loss)


@dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """What all replicas share in a pass. The scheduler is stepped once per update, outside the replicas."""

    strategy: Strategy
    module: MirroredModule
    config: CompileConfig
    precision: Precision
    optimizer: MirroredOptimizer | None = None  # None if nothing is trained
    scheduler: LRScheduler | None = None
    train_step: UserStep | None = None  # that of a subclass of Model, and of evaluation
    test_step: UserStep | None = None

    def targets(self, x: Any, y: Any) -> Any:
        """The targets of arrays: ``y``, or the labels in ``x`` for a loss that the module computes itself."""
        by_module = y is None and isinstance(self.config.loss, ModuleLoss) and isinstance(x, Mapping)
        return x.get("labels") if by_module else y

    def parts(self) -> dict[str, Any]:
        """What a checkpoint saves of it, by name."""
        precision = self.precision if self.precision.name == "fp16" else None
        parts = {
            "model": self.module,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "precision": precision,
        }
        return {name: part for name, part in parts.items() if part is not None}


def keras_execution(
    graphs: bool,
    compile_module: bool | Mapping[str, Any],
    jit_compile: bool | Literal["auto"] | None,
    run_eagerly: bool,
) -> tuple[bool, bool | Mapping[str, Any]]:
    """``graphs`` and ``compile_module`` of ``Model.compile``, with what Keras's two names for them say."""
    if jit_compile not in (True, False, "auto", None):
        raise ConfigError(f"jit_compile={jit_compile!r} is unknown; choose True, False or 'auto'")
    check_kind("run_eagerly", run_eagerly, bool, "True to run every step in Python, or False", optional=False)
    is_compiled = compile_module or jit_compile is True
    if run_eagerly and is_compiled:
        name = "compile_module" if compile_module else "jit_compile=True"
        raise ConfigError(f"run_eagerly=True came with {name}, which compiles the module; leave one of them out")
    return False if run_eagerly else graphs, compile_module or is_compiled


def make_setup(
    strategy: Strategy,
    module: MirroredModule,
    config: CompileConfig,
    optimizer: OptimizerLike | None,
    scheduler: SchedulerLike | None,
) -> TrainSetup:
    """The setup of a module on its strategy, checked. Every worker must call it."""
    if module.is_part and config.precision == "fp16":
        raise ConfigError(
            'precision="fp16" scales losses, which does not work for a model that is sharded over workers; choose '
            '"bf16" or "fp32"'
        )
    precision = Precision(config.precision, strategy.devices[0].torch_device.type)
    setup = TrainSetup(strategy=strategy, module=module, config=config, precision=precision)
    if optimizer is None:
        return setup
    instance = _make_optimizer(optimizer, module.module)
    lr_scheduler = _make_scheduler(scheduler, instance)
    _check_loss(instance, module, config.loss)
    mirrored_optimizer = instance if isinstance(instance, MirroredOptimizer) else strategy.mirror(instance)
    # In a cycle of accumulation the runs leave gradients, which are summed once, with the update.
    mirrored_optimizer.gradients.sums_after_runs = False
    _check_trained(mirrored_optimizer, module, config.loss, strategy.mirrored_modules)
    return replace(setup, optimizer=mirrored_optimizer, scheduler=lr_scheduler)


def _make_optimizer(optimizer: OptimizerLike, module: torch.nn.Module) -> torch.optim.Optimizer:
    instance = (
        optimizer
        if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)
        else optimizer(module.parameters())
    )
    if not isinstance(instance, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(instance).__name__}; give a torch optimizer over module.parameters(), or a function "
            "of them that makes one"
        )
    return instance


def _make_scheduler(scheduler: SchedulerLike | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    if scheduler is None:
        return None
    instance: Any = scheduler if isinstance(scheduler, LRScheduler) or not callable(scheduler) else scheduler(optimizer)
    if isinstance(instance, ReduceLROnPlateau):
        raise ConfigError(
            "scheduler is a ReduceLROnPlateau, which steps by a metric; fit steps schedulers once per update: "
            "choose another, or step it in a callback's on_epoch_end"
        )
    if not isinstance(instance, LRScheduler):
        raise ConfigError(
            f"scheduler is a {type(instance).__name__}; give a torch scheduler of the optimizer, or a function of it "
            "that makes one"
        )
    # A mirrored optimizer shares the list of groups with the plain one, so a scheduler of either is right.
    if instance.optimizer.param_groups is not optimizer.param_groups:
        raise ConfigError(
            f"scheduler is a {type(instance).__name__} of another optimizer, and would not change this one's learning "
            "rate; make it from the optimizer given to compile"
        )
    return instance


def _check_trained(
    optimizer: torch.optim.Optimizer, module: MirroredModule, loss: object, modules: Sequence[MirroredModule]
) -> None:
    """Checks that the optimizer holds parameters of the module and the loss only.

    It holds others when a cell of a notebook that makes the module is run again. ``modules`` are possible owners.
    """
    holders = [module, loss] if isinstance(loss, MirroredModule) else [module]
    ids = {id(parameter) for holder in holders for parameter in holder.parameters()}
    strays = [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) not in ids]
    if not strays:
        return
    owners = [(owner, name) for owner in modules for name, weight in owner.named_parameters() if weight is strays[0]]
    kind, name = (type(owners[0][0].module).__name__, owners[0][1]) if owners else ("module", "a parameter")
    raise UsageError(
        f"the optimizer holds {len(strays)} parameters that are not the model's, such as {name!r} of another {kind}; "
        "make a new optimizer from this module's parameters, or give compile a function of them that makes one"
    )


def _check_loss(optimizer: torch.optim.Optimizer, module: MirroredModule, loss: object) -> None:
    """Checks that the loss has no trained parameters of its own, unless it is mirrored and the optimizer holds them."""
    while isinstance(loss, (partial, MethodType)):
        loss = loss.func if isinstance(loss, partial) else loss.__self__
    if not isinstance(loss, torch.nn.Module):
        return
    is_mirrored = isinstance(loss, MirroredModule)
    parameter_ids = {id(parameter) for parameter in module.parameters()}
    group_ids = {id(weight) for group in optimizer.param_groups for weight in group["params"]} if is_mirrored else set()
    ids = parameter_ids | group_ids
    strays = [name for name, weight in loss.named_parameters() if weight.requires_grad and id(weight) not in ids]
    if strays:
        reason = "that the optimizer does not hold" if is_mirrored else "of which every replica needs a copy"
        advice = "" if is_mirrored else "in the strategy's scope call loss = strategy.mirror(loss), "
        raise UsageError(
            f"the loss has trained parameters of its own {reason}, such as {strays[0]!r}; {advice}make the optimizer "
            "from the parameters of the module and of the loss, or call loss.requires_grad_(False)"
        )
