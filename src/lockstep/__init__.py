"""Train one model on many devices as if on one.

The names are those of ``tf.distribute`` where it has one, and PyTorch's otherwise. Importing this needs torch alone.

Each name is imported when it is first asked for: under ``lockstep run`` a program begins without torch's two seconds
of imports, and has them only if it imports torch itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# Imported now: later the attribute could be the package of the same name.
from lockstep.launch.api import launch

if TYPE_CHECKING:
    from lockstep import config, errors
    from lockstep.checkpoint import Checkpoint, CheckpointManager, export_weights, latest_checkpoint
    from lockstep.cluster.spec import ClusterSpec
    from lockstep.collectives.communicator import CommunicationOptions
    from lockstep.collectives.per_replica import PerReplica
    from lockstep.collectives.reduce import ReduceOp
    from lockstep.data import divide
    from lockstep.data.dataset import InputContext
    from lockstep.data.sharding import has_rows
    from lockstep.launch.batch_size_finder import find_batch_size
    from lockstep.replicas.context import ReplicaContext, get_replica_context
    from lockstep.strategies.average_loss import compute_average_loss, scale_regularization_loss
    from lockstep.strategies.base import Strategy, get_strategy, has_strategy, in_cross_replica_context
    from lockstep.strategies.gather_rows import gather_rows, row_numbers
    from lockstep.strategies.mirrored import MirroredStrategy
    from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy
    from lockstep.strategies.parallel import ParallelStrategy
    from lockstep.train import History, Model, callbacks
    from lockstep.train.callbacks import (
        EMA,
        SWA,
        BackupAndRestore,
        Callback,
        CSVLogger,
        EarlyStopping,
        LambdaCallback,
        LearningRateScheduler,
        MaxTime,
        MLflow,
        ModelCheckpoint,
        ProgressBar,
        RayTrain,
        ReduceLROnPlateau,
        TensorBoard,
        TerminateOnNaN,
        Trackio,
        WeightsAndBiases,
    )
    from lockstep.train.fingerprint import fingerprint
    from lockstep.train.learning_rate_finder import LearningRateRange, find_learning_rate
    from lockstep.train.user_step import TrainStep

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  # which would put EMA first
    "BackupAndRestore", "CSVLogger", "Callback", "Checkpoint", "CheckpointManager", "ClusterSpec",
    "CommunicationOptions", "EMA", "EarlyStopping", "History", "InputContext", "LambdaCallback", "LearningRateRange",
    "LearningRateScheduler", "MLflow", "MaxTime", "MirroredStrategy", "Model", "ModelCheckpoint",
    "MultiWorkerMirroredStrategy", "ParallelStrategy", "PerReplica", "ProgressBar", "RayTrain", "ReduceLROnPlateau",
    "ReduceOp", "ReplicaContext", "SWA", "Strategy", "TensorBoard", "TerminateOnNaN", "Trackio", "TrainStep",
    "WeightsAndBiases", "callbacks", "compute_average_loss", "config", "divide", "errors", "export_weights",
    "find_batch_size", "find_learning_rate", "fingerprint", "gather_rows", "get_replica_context", "get_strategy",
    "has_rows", "has_strategy", "in_cross_replica_context", "latest_checkpoint", "launch", "row_numbers",
    "scale_regularization_loss",
]  # fmt: skip

_WHERE = {
    "lockstep.checkpoint": ("Checkpoint", "CheckpointManager", "export_weights", "latest_checkpoint"),
    "lockstep.cluster.spec": ("ClusterSpec",),
    "lockstep.collectives.communicator": ("CommunicationOptions",),
    "lockstep.collectives.per_replica": ("PerReplica",),
    "lockstep.collectives.reduce": ("ReduceOp",),
    "lockstep.data.dataset": ("InputContext",),
    "lockstep.data.sharding": ("has_rows",),
    "lockstep.launch.batch_size_finder": ("find_batch_size",),
    "lockstep.replicas.context": ("ReplicaContext", "get_replica_context"),
    "lockstep.strategies.base": ("Strategy", "get_strategy", "has_strategy", "in_cross_replica_context"),
    "lockstep.strategies.average_loss": ("compute_average_loss", "scale_regularization_loss"),
    "lockstep.strategies.gather_rows": ("gather_rows", "row_numbers"),
    "lockstep.strategies.mirrored": ("MirroredStrategy",),
    "lockstep.strategies.multi_worker": ("MultiWorkerMirroredStrategy",),
    "lockstep.strategies.parallel": ("ParallelStrategy",),
    "lockstep.train": ("History", "Model"),
    "lockstep.train.callbacks": (
        "BackupAndRestore", "Callback", "CSVLogger", "EMA", "EarlyStopping", "LambdaCallback", "LearningRateScheduler",
        "MLflow", "MaxTime", "ModelCheckpoint", "ProgressBar", "RayTrain", "ReduceLROnPlateau", "SWA",
        "TensorBoard", "TerminateOnNaN", "Trackio", "WeightsAndBiases",
    ),
    "lockstep.train.fingerprint": ("fingerprint",),
    "lockstep.train.learning_rate_finder": ("LearningRateRange", "find_learning_rate"),
    "lockstep.train.user_step": ("TrainStep",),
}  # fmt: skip
_MODULES = {
    "callbacks": "lockstep.train.callbacks",
    "config": "lockstep.config",
    "divide": "lockstep.data.divide",
    "errors": "lockstep.errors",
}
_HOMES = {name: module for module, names in _WHERE.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # which takes a module that has this for one that has every name

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            value = import_module(_MODULES[name])
        elif name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
        else:
            names = import_module("lockstep.tensorflow_names")
            raise names.missing(f"module {__name__!r}", name, names.PACKAGE)
        # Python asks ``__getattr__`` for missing names alone, so the next look costs nothing.
        globals()[name] = value
        return value
