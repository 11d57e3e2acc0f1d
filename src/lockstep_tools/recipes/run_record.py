"""What a finished training run leaves for programs to read: ``result.json`` beside its curves.

The run's name in it tells later runs in the same folder which checkpoints are of a finished run.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.replicas.device.driver import driver_of
from lockstep.replicas.device.memory import MB
from lockstep.strategies.base import Strategy
from lockstep_tools.recipes.training import Result

_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "peft", "numpy", "torchmetrics", "safetensors")
_KIBIBYTES = 1024  # ru_maxrss of Linux counts these


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A finished run.

    Args:
        recipe: its name, such as "mlm".
        run: name of the run, which its logs and checkpoints have too.
        data: what it was trained on, for a person to read.
        config: configuration of the recipe, a dataclass.
        result: result of the training.
        tested_epoch: the epoch, from 1, whose weights were tested and saved.
        layout: devices and workers, see ``layout_of``.
        seconds: how long this process took, from its start to the result.
        memory: peak memory in MB by place, see ``peak_memory``.
    """

    recipe: str
    run: str
    data: str
    config: Any
    result: Result
    tested_epoch: int
    layout: Mapping[str, Any]
    seconds: float
    memory: Mapping[str, int]

    @property
    def settings(self) -> dict[str, Any]:
        """Name -> value of the configuration; paths as text."""
        values = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def to_json(self) -> str:
        """The text of ``result.json``."""
        result = self.result
        record = {
            "recipe": self.recipe,
            "run": self.run,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "data": self.data,
            "test": dict(result.test_metrics),
            "tested_epoch": self.tested_epoch,
            "epochs": len(result.history.epoch),
            "updates": result.updates,
            "parameters": result.parameters,
            "fingerprint": result.fingerprint,
            "configuration": self.settings,
            "layout": dict(self.layout),
            "versions": versions(),
            "seconds": {"run": round(self.seconds, 3), "steps": [asdict(timing) for timing in result.history.timing]},
            "peak_memory_mb": dict(self.memory),
        }
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def layout_of(strategy: Strategy) -> dict[str, Any]:
    """On what a strategy trains: its kind, this worker's devices, and the numbers of workers and replicas."""
    mesh = strategy.layout
    return {
        "strategy": type(strategy).__name__,
        "devices": [device.name for device in strategy.devices],
        "workers": strategy.workers.size,
        "replicas": strategy.num_replicas_in_sync,
        "mesh": None if mesh is None else {"data": mesh.data, "pipeline": mesh.pipeline, "tensor": mesh.tensor},
    }


def peak_memory(strategy: Strategy) -> dict[str, int]:
    """The peak memory of this process in MB: "host", and of tensors on each GPU, by the name of its first device."""
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBIBYTES // MB}
    # Shares of one GPU have one allocator; reversed, so that the first share gives its name.
    gpus = {device.torch_device: device for device in reversed(strategy.devices)}
    for place, device in gpus.items():
        if (driver := driver_of(device)) is not None:
            peaks[device.physical.name] = driver.peak(place) // MB
    return peaks


def versions() -> dict[str, str]:
    """Name -> version of Python, of this package, and of the packages that a recipe uses and that are installed."""
    installed = {"python": platform.python_version(), "lockstep": __version__}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def finished_run(path: Path) -> str | None:
    """The name of the run whose ``result.json`` is at ``path``; None if there is none, or it cannot be read."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
