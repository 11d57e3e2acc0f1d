"""Train one model on many devices as if on one.

The names are those of ``tf.distribute`` where it has one, and PyTorch's otherwise. Importing this needs torch alone.
"""

from lockstep import config, errors
from lockstep.checkpoint import Checkpoint, CheckpointManager, export_weights, latest_checkpoint
from lockstep.cluster.spec import ClusterSpec
from lockstep.collectives.communication import CommunicationOptions
from lockstep.collectives.per_replica import PerReplica
from lockstep.collectives.reduction import ReduceOp
from lockstep.data.input_context import InputContext
from lockstep.launch.launch import launch
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.strategies.base import Strategy
from lockstep.strategies.default import get_strategy
from lockstep.strategies.losses import compute_average_loss, scale_regularization_loss
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.strategies.scope import has_strategy, in_cross_replica_context
from lockstep.train import History, Model, callbacks
from lockstep.train.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    ProgressBar,
    TensorBoard,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "CheckpointManager",
    "ClusterSpec",
    "CommunicationOptions",
    "EarlyStopping",
    "History",
    "InputContext",
    "LambdaCallback",
    "MirroredStrategy",
    "Model",
    "ModelCheckpoint",
    "MultiWorkerMirroredStrategy",
    "ParallelStrategy",
    "PerReplica",
    "ProgressBar",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "TensorBoard",
    "callbacks",
    "compute_average_loss",
    "config",
    "errors",
    "export_weights",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "latest_checkpoint",
    "launch",
    "scale_regularization_loss",
]
