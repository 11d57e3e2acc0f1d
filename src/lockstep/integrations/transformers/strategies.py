"""Which strategy a Trainer without one uses: all devices that this process, or this job, has."""

from __future__ import annotations

from functools import cache

from lockstep.cluster.resolve import declared_job
from lockstep.config import list_logical_devices
from lockstep.errors import ConfigError
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy
from lockstep.strategies.scope import current_strategy


def chosen_strategy(given: Strategy | None, *, on_cpu: bool) -> Strategy:
    """The strategy that was given, else the one in scope, else one of all local devices or of the whole job.

    Args:
        given: to the Trainer.
        on_cpu: only CPU devices; what ``use_cpu`` of the arguments says.

    Raises:
        ConfigError: a strategy that does not give every replica the whole model.
        ClusterError: the environment declares a job that cannot be joined.
    """
    strategy = given or current_strategy()
    if strategy is not None:
        return _checked(strategy)
    if declared_job() is not None:
        return _strategy_of_job(on_cpu)
    return MirroredStrategy(list_logical_devices("CPU") if on_cpu else None)


def _checked(strategy: Strategy) -> Strategy:
    if not isinstance(strategy, (MirroredStrategy, MultiWorkerMirroredStrategy)):
        raise ConfigError(
            f"the Trainer of lockstep got {strategy!r}, and needs replicas that have the whole model; give a "
            "MirroredStrategy or a MultiWorkerMirroredStrategy"
        )
    return strategy


@cache
def _strategy_of_job(on_cpu: bool) -> Strategy:
    """One for all Trainers of this process: a job is joined once."""
    return MultiWorkerMirroredStrategy(list_logical_devices("CPU") if on_cpu else None)
