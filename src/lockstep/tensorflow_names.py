"""Names of ``tf.distribute`` and ``tf.config`` that are others here: who asks for one is told the new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import ParamSpec

from lockstep.errors import ConfigError

_IN_LOCKSTEP = "the names of tf.{0} are in lockstep itself, such as ls.MirroredStrategy"

PACKAGE: Mapping[str, str] = {
    "distribute": _IN_LOCKSTEP.format("distribute"),
    "experimental": f"{_IN_LOCKSTEP.format('distribute.experimental')} and ls.MultiWorkerMirroredStrategy",
    "OneDeviceStrategy": 'use ls.MirroredStrategy(["cpu:0"]), or no strategy: ls.Model then trains on one device',
    "DistributedValues": "use ls.PerReplica",
    "DistributedDataset": "strategy.distribute_dataset returns one",
    "CrossReplicaContext": "use ls.in_cross_replica_context()",
    "ParameterServerStrategy": "use ls.MultiWorkerMirroredStrategy, which updates all copies at once",
    "CentralStorageStrategy": "use ls.MirroredStrategy, in which each replica has a copy of the weights",
    "TPUStrategy": "use ls.MirroredStrategy on CPUs or GPUs",
    "keras": "use ls.Model for a torch module, or lockstep.integrations.keras for a Keras model",
}
CONFIG: Mapping[str, str] = {
    "experimental": (
        "its names are in ls.config itself: list_physical_devices, list_logical_devices, "
        "set_logical_device_configuration (for set_virtual_device_configuration) and LogicalDeviceConfiguration (for "
        "VirtualDeviceConfiguration)"
    ),
    "set_visible_devices": "give a strategy its devices, as in ls.MirroredStrategy(['gpu:0'])",
    "get_visible_devices": "use ls.config.list_logical_devices()",
    "list_gpus": "use ls.config.list_physical_devices('GPU')",
}
STRATEGY: Mapping[str, str] = {
    "experimental_run_v2": "use strategy.run(fn, args, kwargs)",
    "experimental_run": "use strategy.run(fn, args, kwargs)",
    "experimental_distribute_dataset": "use strategy.distribute_dataset(batches)",
    "experimental_make_numpy_dataset": "use strategy.distribute_dataset(batches)",
    "make_dataset_iterator": "use strategy.distribute_dataset(batches)",
    "experimental_distribute_datasets_from_function": "use strategy.distribute_datasets_from_function(fn)",
    "experimental_local_results": "use strategy.local_results(value)",
    "unwrap": "use strategy.local_results(value)",
    "experimental_distribute_values_from_function": "use ls.PerReplica([value of each local replica])",
    "cluster_resolver": (
        "use strategy.task, which is 'worker' or 'evaluator', and strategy.workers, which has index, size and is_chief"
    ),
    "extended": "use the strategy's own methods: run, reduce, gather, local_results and variable",
}

ARGUMENTS: Mapping[str, str] = {
    "communication_options": "it is communication=ls.CommunicationOptions(...) of MultiWorkerMirroredStrategy",
    "communication": "give it to MultiWorkerMirroredStrategy: MirroredStrategy has one worker",
    "cluster_resolver": "it is cluster=ls.ClusterSpec(...) of MultiWorkerMirroredStrategy",
    "cross_device_ops": "leave it out: replicas are always summed in one order, which gives the same bits",
}

P = ParamSpec("P")


def told(init: Callable[P, None]) -> Callable[P, None]:
    """The constructor of a strategy, which tells who calls it with an argument of tf.distribute what it is here."""

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in ARGUMENTS.keys() & kwargs.keys() - signature(init).parameters.keys():
            raise ConfigError(f"{name} was given, which is unknown here; {ARGUMENTS[name]}")
        init(*args, **kwargs)

    return checked


def missing(owner: str, name: str, names: Mapping[str, str]) -> AttributeError:
    """The error for ``name``, which ``owner`` ("module 'lockstep'") lacks, with what to use instead if it is known."""
    advice = f"; {names[name]}" if name in names else ""
    return AttributeError(f"{owner} has no attribute {name!r}{advice}")
