"""Which steps cannot be captured, and what a captured step assumes: addresses, settings, and the absence of hooks.

A replay sees new values at the same addresses. It does not see new tensors, a new ``p`` of a dropout, or another
training mode. So all of it is compared before every replay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from lockstep.replicas.device.driver import DeviceDriver, driver_of
from lockstep.train.compile import TrainSetup

_PLAIN = (bool, int, float, str)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_PRECISIONS: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn,
)


class NotCapturableError(Exception):
    """Steps cannot be captured. The message says why, and what to do if something can be done. It never leaves fit."""


def driver_for(setup: TrainSetup) -> DeviceDriver | None:
    """The driver of the GPU that all replicas are on; None on a CPU. A NotCapturableError if it cannot capture them."""
    strategy, module, optimizer = setup.strategy, setup.module, setup.optimizer
    driver = driver_of(strategy.devices[0])
    if driver is None or optimizer is None:
        return None
    not_fused, kind = optimizer.storages.not_fused, type(optimizer.plain)
    sparse = [each for each in module.module.modules() if isinstance(each, _EMBEDDINGS) and each.sparse]
    num_gpus = len({device.physical.name for device in strategy.devices})
    fp16 = setup.config.precision == "fp16"
    refused = {
        "several workers exchange gradients, and a CUDA graph cannot wait for them": not strategy.workers.is_single,
        "the replicas are on several GPUs, and only those of one GPU are captured together": num_gpus > 1,
        'precision="fp16" asks on the host whether gradients overflowed; "bf16" does not': fp16,
        "accumulate keeps gradients from step to step; give larger batches instead": setup.config.accumulate > 1,
        "the module is compiled, and compiled code hides its tensors; use one of the two": module.is_compiled,
        "train_step is overridden, and may do another thing in every step": setup.train_step is not None,
        "the model is divided among workers": module.pipeline is not None or module.shards_weights,
        "an embedding with sparse=True has gradients of changing size": sparse,
        f"the update is not made by fused kernels: {not_fused}": not_fused is not None,
        f"{kind.__name__} takes its rate as a number; Adam, AdamW and SGD do not": kind not in (SGD, Adam, AdamW),
    }
    for reason, applies in refused.items():
        if applies:
            raise NotCapturableError(reason)
    return driver


def check_before_capture(setup: TrainSetup) -> None:
    """Raises a NotCapturableError for hooks, which a replay would not call, and for gradients that no update takes."""
    hooked = ["all modules"] if any(_global_hooks()) else []
    hooked += [f"a {type(part).__name__}" for part in setup.module.module.modules() if any(_hooks_of(part))]
    weights = list(setup.module.module.parameters())
    hooked += ["a parameter" for each in weights if each._backward_hooks or each._post_accumulate_grad_hooks]
    if hooked:
        raise NotCapturableError(f"the hooks of {hooked[0]} would run once, during the capture; remove them")
    if any(each.grad is not None for copy in setup.module.copies for each in copy.parameters()):
        raise NotCapturableError("gradients are left after the update, of parameters that the optimizer does not hold")


class StepGuards:
    """A snapshot of everything outside its inputs that a captured step depends on.

    Only the user's own module is compared: what is set there reaches the other copies at the next run. Learning rates
    are left out, as captured steps read them from tensors.
    """

    def __init__(self, setup: TrainSetup) -> None:
        self._setup = setup
        self._held = self._tensors()  # so that no new tensor gets the address of one that is gone
        self._before = self._now()

    def change(self) -> str | None:
        """What has changed; None if nothing has."""
        return next((name for name, now in self._now().items() if now != self._before[name]), None)

    def _tensors(self) -> list[torch.Tensor]:
        module, optimizer = self._setup.module.module, self._setup.optimizer
        states = (
            [] if optimizer is None else [state for each in optimizer.storages.every for state in each.state.values()]
        )
        values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [*module.parameters(), *module.buffers(), *values]

    def _now(self) -> dict[str, Any]:
        parts, tensors = list(self._setup.module.module.modules()), self._tensors()
        groups = [] if self._setup.optimizer is None else self._setup.optimizer.param_groups
        return {
            "the children of a module": parts,
            "the attributes of a module": [
                {name: value if isinstance(value, _PLAIN) else None for name, value in vars(part).items()}
                for part in parts
            ],
            "the addresses of weights, buffers or the optimizer's state": [each.data_ptr() for each in tensors],
            "which parameters are trained": [each.requires_grad for each in tensors],
            "the settings of the optimizer": [
                {name: value for name, value in group.items() if name not in ("params", "lr")} for group in groups
            ],
            "hooks": any(_global_hooks()) or any(hooks for part in parts for hooks in _hooks_of(part)),
            "the settings of precision or autograd": [
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cuda"),
                torch.get_autocast_dtype("cuda"),
                torch.are_deterministic_algorithms_enabled(),
                # Read one by one: torch's older names for them raise errors once a program has set one of these.
                *(each.fp32_precision for each in _PRECISIONS),
            ],
        }


def _hooks_of(part: nn.Module) -> list[Any]:
    return [part.__dict__[name] for name in _HOOKS]


def _global_hooks() -> list[Any]:
    return [vars(torch.nn.modules.module)[f"_global{name}"] for name in _HOOKS]
