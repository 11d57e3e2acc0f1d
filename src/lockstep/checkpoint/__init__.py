"""Saving and restoring: weights as one safetensors file, and all state of a training as a folder a step."""

from __future__ import annotations

from lockstep.checkpoint.checkpoint import Checkpoint
from lockstep.checkpoint.export import export_weights
from lockstep.checkpoint.folder import latest_checkpoint
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checkpoint.weights import check_fit, read_weights, write_weights

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "check_fit",
    "export_weights",
    "latest_checkpoint",
    "read_weights",
    "write_weights",
]
