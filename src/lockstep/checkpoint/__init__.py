"""Checkpoints: all state of a training, saved as one folder a step, restored on any layout; weights as safetensors.

``Checkpoint`` collects and restores the state of named things; ``CheckpointManager`` saves it to a folder again and
again. Begin reading at ``checkpoint``. The modules, each of which imports only those before it:

    weights -> checksums -> sharded_io -> format (what is in a checkpoint's folder)
        -> folder (a folder of checkpoints: which are there, which are removed) -> export
    state_adapters (one for each kind of thing) -> adapter_choice -> checkpoint -> manager (when to save and remove)
    conditions (devices and versions, compared on resuming); fingerprint (equal for equal state, on any layout)

``sharded_state`` has the adapters of models that workers hold parts of, and is imported only with one.
"""

from __future__ import annotations

from lockstep.checkpoint.checkpoint import Checkpoint
from lockstep.checkpoint.export import export_weights
from lockstep.checkpoint.folder import latest_checkpoint
from lockstep.checkpoint.manager import CheckpointManager

__all__ = ["Checkpoint", "CheckpointManager", "export_weights", "latest_checkpoint"]
