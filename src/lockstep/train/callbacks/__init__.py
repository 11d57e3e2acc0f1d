"""Callbacks of Model, with Keras's hooks, names and arguments.

``base`` has Callback, LambdaCallback, and CallbackList, which calls them: begin there. The others are the callbacks
that Keras users know: checkpoints, early stopping, the learning rate, loggers, and the progress bar; and averages of
the weights, a limit of time, and reports to Ray Train.
"""

from __future__ import annotations

from lockstep.train.callbacks.averages import EMA, SWA
from lockstep.train.callbacks.base import Callback, CallbackList, LambdaCallback
from lockstep.train.callbacks.checkpoints import BackupAndRestore, ModelCheckpoint
from lockstep.train.callbacks.early_stopping import EarlyStopping
from lockstep.train.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau, TerminateOnNaN
from lockstep.train.callbacks.loggers import CSVLogger, MLflow, TensorBoard, Trackio, WeightsAndBiases
from lockstep.train.callbacks.max_time import MaxTime
from lockstep.train.callbacks.progress import ProgressBar
from lockstep.train.callbacks.ray_train import RayTrain

__all__ = [
    "EMA",
    "SWA",
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateScheduler",
    "MLflow",
    "MaxTime",
    "ModelCheckpoint",
    "ProgressBar",
    "RayTrain",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
    "Trackio",
    "WeightsAndBiases",
]
