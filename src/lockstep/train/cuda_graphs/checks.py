"""Which steps cannot be captured, and whether two steps are alike.

A captured step repeats the operators of one step with the numbers of that step, on the same memory. A loss weight that
grows, a layer that is left out by chance, a new tensor, or a new ``p`` of a dropout would stay as they were. So the
settings and addresses are compared before every step, and the operators of two steps before one is captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from lockstep._torch_compat import TorchDispatchMode, tree_leaves
from lockstep.collectives.communicator import call_site
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.device.host_syncs import host_waits
from lockstep.train.compile import TrainSetup

_PLAIN = (bool, int, float, str)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NotCapturableError(Exception):
    """Steps cannot be captured. The message says why, and what to do if something can be done. It never leaves fit."""


def check_setup(setup: TrainSetup, optimizer: MirroredOptimizer) -> None:
    """Raises a NotCapturableError if no step of this setup can be captured."""
    strategy, module = setup.strategy, setup.module
    not_fused, kind = optimizer.storages.not_fused, type(optimizer.plain)
    embeddings = [each for each in module.module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
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
        "sync_batchnorm=True reads its counts on the host": module.has_sync_batchnorm,
        "an embedding with sparse=True has gradients of changing size": any(each.sparse for each in embeddings),
        f"the update is not made by fused kernels: {not_fused}": not_fused is not None,
        f"{kind.__name__} takes its rate as a number; Adam, AdamW and SGD do not": kind not in (SGD, Adam, AdamW),
    }
    for reason, applies in refused.items():
        if applies:
            raise NotCapturableError(reason)


class _Call(NamedTuple):
    """An operator of a step; its arguments, each with its storage if it is from outside the step; its line."""

    name: str
    arguments: list[tuple[str, int | None]]
    line: str  # " at train.py:30 in loss"; empty in a backward pass, and in this package

    def __str__(self) -> str:
        return f"{self.name}({', '.join(text for text, _ in self.arguments)})" if self.name else "no operator"


class StepRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a step depends on besides its batch; and its operators, if it runs under this mode, as its replicas then do.

    Of the module only the user's own is looked at: what is set there reaches the other copies. Learning rates are left
    out, as captured steps read them from tensors. A NotCapturableError is raised for hooks, which a replay would not
    call, and for gradients that no update takes. ``wait`` is the first operator for which the host waits.
    """

    def __init__(self, setup: TrainSetup, optimizer: MirroredOptimizer, batch: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        module, backends = setup.module.module, torch.backends
        parts, weights = list(module.modules()), list(module.parameters())
        _refuse_hooks(parts, weights)
        if any(each.grad is not None for copy in setup.module.copies for each in copy.parameters()):
            raise NotCapturableError("gradients are left after the update, of parameters the optimizer does not hold")
        states = [value for each in optimizer.storages.every for own in each.state.values() for value in own.values()]
        # Held, so that no new tensor gets the address of one that is gone, and graphs read no freed memory.
        self._held = [*weights, *module.buffers(), *(value for value in states if isinstance(value, Tensor))]
        self._found: dict[str, list[Any]] = {
            "the children of a module": parts,
            "the attributes of a module": [
                {name: value if isinstance(value, _PLAIN) else None for name, value in vars(part).items()}
                for part in parts
            ],
            "the addresses of weights, buffers or the optimizer's state": [each.data_ptr() for each in self._held],
            "which parameters are trained": [each.requires_grad for each in self._held],
            "the settings of the optimizer": [
                {name: value for name, value in group.items() if name not in ("params", "lr")}
                for group in optimizer.param_groups
            ],
            # Read one by one: torch's older names for them raise errors once a program has set one of these.
            "the settings of precision": [
                each.fp32_precision
                for each in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)  # type: ignore[attr-defined]
            ],
        }
        self.wait: str | None = None
        self._on_host = setup.strategy.devices[0].torch_device.type == "cpu"
        # The extra list is for collectives: the replica that comes last does there what is done once for all.
        self._calls: list[list[_Call]] = [[] for _ in range(len(setup.strategy.devices) + 1)]
        # By storage, as a view of the batch is the batch. Replicas see each other's tensors when gradients are summed.
        self._made = {_storage(tensor) for tensor in batch}

    def change(self, now: StepRecord) -> str | None:
        """What a later step found changed before it ran; None if nothing has."""
        return next((name for name, found in self._found.items() if found != now._found[name]), None)

    def difference(self, later: StepRecord) -> str | None:
        """The first operator that a later step has not run alike; None if it has run all."""
        for ours, theirs in zip(self._calls, later._calls, strict=True):
            for mine, other in zip_longest(ours, theirs, fillvalue=_Call("", [], "")):
                if mine[:2] != other[:2]:
                    text = f"{mine}{mine.line or other.line}"
                    if str(mine) == str(other):
                        return f"{text} reads a tensor that is another one in every step; update it in place"
                    return f"{text} is {other} in the next step"
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, context, site = kwargs or {}, get_replica_context(), call_site()
        line = f" at {site}" if site else ""
        if self.wait is None and host_waits(func, args, kwargs):
            self.wait = f"{func}{line}"
        # A captured step reads the rate of fused optimizers from a tensor.
        given = tree_leaves((args, {name: value for name, value in kwargs.items() if name != "lr"}))
        call = _Call(str(func), [self._argument(func, leaf) for leaf in given], line)
        self._calls[-1 if context is None else context.local_replica].append(call)
        result = func(*args, **kwargs)
        # A view of a tensor from outside is from outside too, and an operator that writes returns what it was given.
        if not func.is_view and not func._schema.is_mutable:
            self._made.update(_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def _argument(self, func: Any, leaf: Any) -> tuple[str, int | None]:
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, (*_PLAIN, complex, torch.dtype)) else type(leaf).__name__, None
        text, storage = f"{leaf.dtype}{list(leaf.shape)}", _storage(leaf)
        # What a kernel gets from a tensor on the host is its numbers. torch.tensor makes its own by lift_fresh.
        if leaf.device.type == "cpu" and (not self._on_host or func is torch.ops.aten.lift_fresh.default):
            text = str(leaf.tolist())
            self._made.add(storage)
        if storage in self._made:
            return text, None
        self._held.append(leaf)
        return text, storage


def _refuse_hooks(parts: list[nn.Module], weights: list[nn.Parameter]) -> None:
    hooked = ["all modules"] * any(vars(nn.modules.module)[f"_global{name}"] for name in _HOOKS)
    hooked += [f"a {type(part).__name__}" for part in parts if any(vars(part)[name] for name in _HOOKS)]
    hooked += ["a parameter" for each in weights if each._backward_hooks or each._post_accumulate_grad_hooks]
    if hooked:
        raise NotCapturableError(f"the hooks of {hooked[0]} would run once, during the capture; remove them")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
