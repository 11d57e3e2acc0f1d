"""What ``compile`` makes of its arguments: the one object that every pass, and every replica in it, reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import ConfigError
from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.optimizer import MirroredOptimizer
from lockstep.strategies.base import Strategy
from lockstep.train.compile_config import CompileConfig
from lockstep.train.optimizing import (
    OptimizerLike,
    SchedulerLike,
    check_loss,
    check_trained,
    make_optimizer,
    make_scheduler,
)
from lockstep.train.precision import Precision


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all replicas share in a pass.

    Args:
        module: the mirrored module.
        config: what compile was given.
        precision: the meaning of ``config.precision`` on the strategy's devices.
        optimizer: the mirrored optimizer; None where nothing is trained.
        scheduler: of its learning rate, stepped outside the replicas, once per update.
    """

    module: MirroredModule
    config: CompileConfig
    precision: Precision
    optimizer: MirroredOptimizer | None = None
    scheduler: LRScheduler | None = None


def make_job(
    strategy: Strategy,
    module: MirroredModule,
    config: CompileConfig,
    optimizer: OptimizerLike | None,
    scheduler: SchedulerLike | None,
) -> Job:
    """The job of a module on its strategy. Every worker must call it.

    Raises:
        ConfigError: no optimizer, or no scheduler, and no function that makes one.
        UsageError: an optimizer over other parameters than the module's, or a loss with parameters that it does not
            train.
    """
    if module.is_part and config.precision == "fp16":
        raise ConfigError(
            'precision="fp16" scales losses, which does not work yet where a model is divided among workers; choose '
            '"bf16" or "fp32"'
        )
    precision = Precision(config.precision, strategy.devices[0].torch_device.type)
    if optimizer is None:
        return Job(module=module, config=config, precision=precision)
    made = make_optimizer(optimizer, module.module)
    stepped = make_scheduler(scheduler, made)
    check_loss(made, module, config.loss)
    mirrored = made if isinstance(made, MirroredOptimizer) else strategy.mirror(made)
    mirrored.sums_after_runs = False
    check_trained(mirrored, module, config.loss, strategy.mirrored_modules)
    return Job(module=module, config=config, precision=precision, optimizer=mirrored, scheduler=stepped)
