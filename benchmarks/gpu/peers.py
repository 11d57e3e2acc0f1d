"""Accelerate, Lightning Fabric and the Transformers Trainer on one device, where this Python has them.

Each is written as its documentation has it, with the same modules, losses and optimizer as everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from operator import itemgetter
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.gpu.loops import LapTimer, Setting, begin_process, ready_batches
from benchmarks.loops import adam, call, make_module, trained_parameters
from benchmarks.processes import ProcessInfo
from benchmarks.step_timer import StepTimer
from benchmarks.trial import Batch, Trial
from lockstep.errors import ConfigError
from lockstep.extras import require

PACKAGES = {
    "accelerate": ("accelerate",),
    "fabric": ("lightning_fabric", "lightning.fabric"),
    "trainer": ("transformers",),
}
"""What each peer is imported as; one of the names is enough."""
_NEEDS = {"trainer": ("accelerate",)}


def missing(peer: str) -> str:
    """Why a peer cannot take part, in one line; empty if it can. Imports nothing heavy."""
    names = PACKAGES[peer]
    if not any(map(_is_there, names)):
        return f"{names[0]} is not installed"
    away = [name for name in _NEEDS.get(peer, ()) if not _is_there(name)]
    return f"{away[0]}, which it needs, is not installed" if away else ""


def _is_there(name: str) -> bool:
    parent = name.partition(".")[0]
    return find_spec(parent) is not None and (parent == name or find_spec(name) is not None)


def train_accelerate(trial: Trial, process: ProcessInfo, timer: StepTimer, *, setting: Setting) -> None:
    """Hugging Face Accelerate: model, optimizer and loader are prepared by it."""
    accelerate = require("accelerate", "transformers")
    device = begin_process(setting)
    accelerator = accelerate.Accelerator(
        cpu=setting.device == "cpu",
        mixed_precision="no" if setting.precision == "fp32" else "bf16",
        dataloader_config=accelerate.DataLoaderConfiguration(non_blocking=True),
    )
    module = make_module(trial, device)
    model, optimizer, loader = accelerator.prepare(module, adam(trial.workload, module), _loader(trial, setting))
    _loop(trial, timer, setting, module, (model, optimizer, loader), accelerator.backward)


def train_fabric(trial: Trial, process: ProcessInfo, timer: StepTimer, *, setting: Setting) -> None:
    """Lightning Fabric: model, optimizer and loader are set up by it."""
    name = next(name for name in PACKAGES["fabric"] if _is_there(name))
    device = begin_process(setting)
    precision = "32-true" if setting.precision == "fp32" else "bf16-mixed"
    fabric = import_module(name).Fabric(accelerator=setting.device, devices=1, precision=precision)
    fabric.launch()
    module = make_module(trial, device)
    model, optimizer = fabric.setup(module, adam(trial.workload, module))
    loader = fabric.setup_dataloaders(_loader(trial, setting))
    _loop(trial, timer, setting, module, (model, optimizer, loader), fabric.backward)


def _loop(
    trial: Trial, timer: StepTimer, setting: Setting, module: nn.Module, prepared: tuple[Any, Any, Any], backward: Any
) -> None:
    """The loop that both document: clear, forward, backward by the framework, update."""
    model, optimizer, loader = prepared
    timer.trained = trained_parameters(module)
    laps = LapTimer(timer, setting.pace, setting.torch_device)
    losses = torch.zeros((), device=setting.torch_device)
    for x, y in loader:
        optimizer.zero_grad()
        total, _ = trial.workload.loss(call(model, x), y)
        loss = total / trial.workload.count
        backward(loss)
        optimizer.step()
        losses.add_(loss.detach())
        laps.step(lambda: losses.item() / setting.pace.steps)


def train_trainer(trial: Trial, process: ProcessInfo, timer: StepTimer, *, setting: Setting) -> None:
    """The Trainer of transformers: its own loop; the module returns the loss."""
    transformers = require("transformers", "transformers")
    device = begin_process(setting)
    module = make_module(trial, device)
    timer.trained = trained_parameters(module)
    wrapped = _ReturnsItsLoss(trial, module)
    laps = LapTimer(timer, setting.pace, device)

    class LapEveryStep(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            laps.step(lambda: wrapped.losses.item() / setting.pace.steps)

    with TemporaryDirectory(prefix="lockstep-bench-") as folder:
        trainer = transformers.Trainer(
            wrapped,
            _arguments(transformers, folder, trial, setting),
            data_collator=_named_batch,
            train_dataset=ready_batches(trial, setting),
            optimizers=(adam(trial.workload, module), None),
            callbacks=[LapEveryStep()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def _arguments(transformers: Any, folder: str, trial: Trial, setting: Setting) -> Any:
    """One item of the loader is a whole global batch already, pinned; nothing is logged, saved or clipped."""
    return transformers.TrainingArguments(
        folder,
        max_steps=setting.pace.steps,
        per_device_train_batch_size=1,
        learning_rate=trial.workload.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        bf16=setting.precision == "bf16",
        use_cpu=setting.device == "cpu",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


class _ReturnsItsLoss(nn.Module):
    """The module as the Trainer wants one: it is given the targets too, and returns its loss.

    ``accepts_loss_kwargs`` is read by the Trainer: the loss is divided here, by the workload's count.
    """

    accepts_loss_kwargs = False

    def __init__(self, trial: Trial, module: nn.Module) -> None:
        super().__init__()
        self._workload = trial.workload
        self.module = module
        self.losses = torch.zeros((), device=next(module.parameters()).device)

    def forward(self, labels: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """``{"loss": ...}`` of a global batch."""
        total, _ = self._workload.loss(self.module(**inputs), labels)
        loss = total / self._workload.count
        self.losses += loss.detach()
        return {"loss": loss}


def _named_batch(items: Sequence[Batch]) -> dict[str, Tensor]:
    """The only item, as the arguments of ``_ReturnsItsLoss``."""
    (x, y), *others = items
    if others:
        raise ConfigError(f"{len(items)} global batches came at once, expected 1; the Trainer saw several devices")
    return {**(x if isinstance(x, dict) else {"images": x}), "labels": y}


def _loader(trial: Trial, setting: Setting) -> DataLoader[Any]:
    """A loader whose every item is one global batch."""
    items: Any = ready_batches(trial, setting)
    return DataLoader(items, batch_size=1, collate_fn=itemgetter(0))
