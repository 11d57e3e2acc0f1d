"""Callbacks of Model: one a file, with Keras's hooks, names and arguments."""

from __future__ import annotations

from lockstep.train.callbacks.backup_and_restore import BackupAndRestore
from lockstep.train.callbacks.base import Callback
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.callbacks.csv_logger import CSVLogger
from lockstep.train.callbacks.early_stopping import EarlyStopping
from lockstep.train.callbacks.lambda_callback import LambdaCallback
from lockstep.train.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.train.callbacks.progress import ProgressBar
from lockstep.train.callbacks.tensorboard import TensorBoard

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "LambdaCallback",
    "ModelCheckpoint",
    "ProgressBar",
    "TensorBoard",
]
