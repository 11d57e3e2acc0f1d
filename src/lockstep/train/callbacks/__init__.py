"""Callbacks of Model, with Keras's hooks, names and arguments.

``base`` has Callback, LambdaCallback, and CallbackList, which calls them: begin there. The others are the callbacks
that Keras users know: checkpoints, early stopping, the learning rate, loggers, and the progress bar.
"""

from __future__ import annotations

from lockstep.train.callbacks.base import Callback, CallbackList, LambdaCallback
from lockstep.train.callbacks.checkpoints import BackupAndRestore, ModelCheckpoint
from lockstep.train.callbacks.early_stopping import EarlyStopping
from lockstep.train.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau, TerminateOnNaN
from lockstep.train.callbacks.loggers import CSVLogger, MLflow, TensorBoard, Trackio, WeightsAndBiases
from lockstep.train.callbacks.progress import ProgressBar

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateScheduler",
    "MLflow",
    "ModelCheckpoint",
    "ProgressBar",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
    "Trackio",
    "WeightsAndBiases",
]
