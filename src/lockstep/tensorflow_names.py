"""Names of ``tf.distribute``, ``tf.config`` and ``keras.Model`` that Lockstep lacks, and what errors name instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

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

_SAVE = (
    "a torch module has no file format that holds its code too; model.save_weights('model.safetensors') writes its "
    "weights, ls.ModelCheckpoint(folder, save_weights_only=False) all state of the training"
)
_LAYERS = "the layers are in model.module, such as model.module.named_modules()"
_WEIGHTS = "use model.module.parameters(), model.state_dict() or model.get_weights()"
MODEL: Mapping[str, str] = {
    "save": _SAVE,
    "export": "use torch.export.export(model.module, (x,)) or torch.onnx.export",
    "to_json": _SAVE,
    "get_config": _SAVE,
    "layers": _LAYERS,
    "get_layer": _LAYERS,
    "add": "build the torch.nn.Sequential first, and give it to ls.Model",
    "build": "torch's layers are built with the sizes of their inputs; model.summary(x) shows the shapes",
    "weights": _WEIGHTS,
    "variables": _WEIGHTS,
    "trainable_variables": _WEIGHTS,
    "trainable_weights": _WEIGHTS,
    "trainable": "set requires_grad of the parameters in model.module before compile",
    "loss": "it is the loss given to compile",
    "reset_metrics": "metrics begin again by themselves in every epoch",
}
COMPILE: Mapping[str, str] = {
    "loss_weights": "weigh the losses in a function: lambda outputs, targets: a(outputs, targets) + 0.5 * b(outputs, "
    "targets), each with reduction='none'",
    "weighted_metrics": "metrics count each row once; give a torchmetrics Metric that weighs rows by themselves",
    "steps_per_execution": "leave it out: on a GPU whole steps are captured, and a callback sees every step",
    "auto_scale_loss": "it is precision='fp16', which scales the loss",
    "gradient_accumulation_steps": "it is accumulate=",
}
EVALUATE: Mapping[str, str] = {"return_dict": "leave it out: evaluate returns a dict"}

P = ParamSpec("P")
T = TypeVar("T")


def advise(arguments: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function, so that an argument of TensorFlow that it lacks is a ConfigError with what to give."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            # Only what the function does not take: subclasses may have an argument of that name.
            for name in arguments.keys() & kwargs.keys() - signature(function).parameters.keys():
                raise ConfigError(f"{name} was given, which is unknown here; {arguments[name]}")
            return function(*args, **kwargs)

        return call

    return decorate


def missing(owner: str, name: str, names: Mapping[str, str]) -> AttributeError:
    """The error for ``name``, which ``owner`` ("module 'lockstep'") lacks, with what to use instead if it is known."""
    advice = f"; {names[name]}" if name in names else ""
    return AttributeError(f"{owner} has no attribute {name!r}{advice}")
