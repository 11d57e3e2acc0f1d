"""Runs each training step of a fit on a GPU: as usual, observed, or captured as a CUDA graph and replayed.

    first of its kind        runs as usual: optimizer state, buffers and workspaces of libraries are created
    second, third            observed, until two in a row were alike
    next                     captured and replayed
    all others               replayed:

    batch            -> copied to fixed addresses --.
    learning rates   -> tensors on the device ------+-- replay --> outputs, copied for the caller

A captured step repeats the operators of one step with the numbers of that step, on the same memory. A loss weight that
grows, a layer that is left out by chance, a new tensor, or a new ``p`` of a dropout would stay as they were. So the
settings and addresses are compared before every step, and the operators of two steps before one is captured. The first
step of each epoch is observed once more, as callbacks may have changed what Python computes with.

Steps are of one kind if one captured step serves their batches. The choice depends on the steps alone and never on
time, so that a program makes the same choices each time it runs. Metrics count in Python, so they are updated after the
step. ``GraphedSteps.run`` is where to begin. Steps on a CPU never come here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from lockstep import _torch_compat as compat
from lockstep.collectives.communicator import call_site
from lockstep.collectives.per_replica import PerReplica, select
from lockstep.data.structure import is_plain
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.device.driver import DeviceDriver, driver_of
from lockstep.replicas.device.host_syncs import host_waits
from lockstep.strategies.base import Strategy
from lockstep.train.compile import TrainSetup
from lockstep.train.step import ReplicaState, StepOutput, train_step, update_metrics

_LOG = logging.getLogger("lockstep")

MAX_BEGINNINGS = 32
"""How often steps are observed anew in one fit: with more kinds of batches or changes, few would be replayed."""
_SHOWN = 16  # numbers of a tensor on the host; of a longer one a hash
_PLAIN = (bool, int, float, complex, str)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NotCapturableError(Exception):
    """Steps cannot be captured. The message says why, and what to do if something can be done. It never leaves fit."""


def check_setup(setup: TrainSetup, optimizer: MirroredOptimizer) -> None:
    """Raises a NotCapturableError if no step of this setup can be captured."""
    strategy, module = setup.strategy, setup.module
    not_fused, kind = optimizer.storages.not_fused, type(optimizer.plain)
    embeddings = [part for part in module.module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
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
        "an embedding with sparse=True has gradients of changing size": any(
            embedding.sparse for embedding in embeddings
        ),
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


class StepRecord(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        if any(parameter.grad is not None for copy in setup.module.copies for parameter in copy.parameters()):
            raise NotCapturableError("gradients are left after the update, of parameters the optimizer does not hold")
        states = [
            value
            for plain in optimizer.storages.optimizers
            for state in plain.state.values()
            for value in state.values()
        ]
        # Held, so that no new tensor gets the address of one that is gone, and graphs read no freed memory.
        self._live_tensors = [*weights, *module.buffers(), *(value for value in states if isinstance(value, Tensor))]
        self._conditions: dict[str, list[Any]] = {
            "the children of a module": parts,
            "the attributes of a module": [
                {name: value if isinstance(value, _PLAIN) else None for name, value in vars(part).items()}
                for part in parts
            ],
            "the addresses of weights, buffers or the optimizer's state": [
                tensor.data_ptr() for tensor in self._live_tensors
            ],
            "which parameters are trained": [tensor.requires_grad for tensor in self._live_tensors],
            "the settings of the optimizer": [
                {name: value for name, value in group.items() if name not in ("params", "lr")}
                for group in optimizer.param_groups
            ],
            # Read one by one: torch's older names for them raise errors once a program has set one of these.
            "the settings of precision": [
                backend.fp32_precision
                for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)  # type: ignore[attr-defined]
            ],
        }
        self.wait: str | None = None
        self._on_host = setup.strategy.devices[0].torch_device.type == "cpu"
        # The extra list is for collectives: the replica that comes last does there what is done once for all.
        self._calls: list[list[_Call]] = [[] for _ in range(len(setup.strategy.devices) + 1)]
        # By storage, as a view of the batch is the batch. Replicas see each other's tensors when gradients are summed.
        self._step_storages = {_storage(tensor) for tensor in batch}

    def change(self, now: StepRecord) -> str | None:
        """Returns the first condition that a later step does not share, before it runs; None if it shares all."""
        return next((name for name, value in self._conditions.items() if value != now._conditions[name]), None)

    def difference(self, later: StepRecord) -> str | None:
        """Describes the first operator in which a later step differs from this one; None if all are equal."""
        for earlier_calls, later_calls in zip(self._calls, later._calls, strict=True):
            for call, other in zip_longest(earlier_calls, later_calls, fillvalue=_Call("", [], "")):
                if call[:2] != other[:2]:
                    text = f"{call}{call.line or other.line}"
                    if str(call) == str(other):
                        return f"{text} reads a tensor that is another one in every step; update it in place"
                    return f"{text} is {other} in the next step"
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, context, site = kwargs or {}, get_replica_context(), call_site()
        line = f" at {site}" if site else ""
        if self.wait is None and host_waits(func, args, kwargs):
            self.wait = f"{func}{line}"
        # A captured step reads the rate of fused optimizers from a tensor.
        leaves = compat.tree_leaves((args, {name: value for name, value in kwargs.items() if name != "lr"}))
        call = _Call(str(func), [self._argument(func, leaf) for leaf in leaves], line)
        self._calls[-1 if context is None else context.local_replica].append(call)
        result = func(*args, **kwargs)
        # What an operator returns of a tensor from outside, such as a view, has been compared in this call.
        self._step_storages.update(_storage(leaf) for leaf in compat.tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def _argument(self, func: Any, leaf: Any) -> tuple[str, int | None]:
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, (*_PLAIN, torch.dtype)) else type(leaf).__name__, None
        text, storage = f"{leaf.dtype}{list(leaf.shape) if is_plain(leaf) else leaf.layout}", _storage(leaf)
        # What a kernel gets from a tensor on the host is its numbers. torch.tensor makes its own by lift_fresh.
        on_host = leaf.device.type == "cpu" and (not self._on_host or func is torch.ops.aten.lift_fresh.default)
        if on_host and is_plain(leaf):
            flat = leaf.detach().resolve_conj().resolve_neg().reshape(-1)
            values = (
                flat.tolist() if len(flat) <= _SHOWN else sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
            )
            text = f"{text} of {values}"
            self._step_storages.add(storage)
        if storage in self._step_storages:
            return text, None
        self._live_tensors.append(leaf)
        return text, storage


def _refuse_hooks(parts: list[nn.Module], weights: list[nn.Parameter]) -> None:
    hooked = ["all modules"] * any(vars(nn.modules.module)[f"_global{name}"] for name in _HOOKS)
    hooked += [f"a {type(part).__name__}" for part in parts if any(vars(part)[name] for name in _HOOKS)]
    hooked += ["a parameter" for weight in weights if weight._backward_hooks or weight._post_accumulate_grad_hooks]
    if hooked:
        raise NotCapturableError(f"the hooks of {hooked[0]} would run once, during the capture; remove them")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if is_plain(tensor) else id(tensor)


class LaterMetrics(list[tuple[Any, Any]]):
    """Takes the place of a replica's metrics, and keeps the (outputs, targets) that they are to be updated with."""

    def update(self, outputs: Any, targets: Any) -> None:
        self.append((outputs, targets))


_Results = tuple[tuple[StepOutput, ...], list[LaterMetrics]]


@dataclass
class _Kind:
    """What is known of one kind of step."""

    record: StepRecord | None = None  # of the last one that was observed
    alike: bool = False  # to the one before it
    replay: Callable[[list[Any]], _Results] | None = None


class GraphedSteps:
    """Runs the training steps of all replicas, replayed from CUDA graphs where possible.

    Where steps cannot be captured, the log "lockstep" says why, and they run as usual.
    """

    def __init__(
        self, setup: TrainSetup, optimizer: MirroredOptimizer, states: PerReplica[ReplicaState], driver: DeviceDriver
    ) -> None:
        self._setup, self._optimizer, self._states, self._driver = setup, optimizer, states, driver
        self._strategy, self._device = setup.strategy, setup.strategy.devices[0].torch_device
        self._pool = driver.graph_pool(self._device)
        self._kinds: dict[Hashable, _Kind] = {}
        self._beginnings, self._gave_up = 0, False
        self._alike_in = -1  # the last epoch in which a step was like the one before it of its kind

    @classmethod
    def create(cls, setup: TrainSetup, states: PerReplica[ReplicaState]) -> GraphedSteps | None:
        """The steps of a fit; None on a CPU and with ``graphs=False``."""
        driver, optimizer = driver_of(setup.strategy.devices[0]), setup.optimizer
        if driver is None or optimizer is None or not setup.config.graphs:
            return None
        return cls(setup, optimizer, states, driver)

    def run(self, batch: Any, *, epoch: int) -> tuple[StepOutput, ...] | None:
        """One step of every replica on a sharded batch; None if it is to run as usual. Epochs count from 0."""
        if self._gave_up or self._strategy.is_watched:
            return None
        try:
            leaves, structure = _flat(batch, self._strategy)
            key = (structure, *map(_form, leaves))
            if key not in self._kinds:
                self._begin(f"batches came in more than {len(self._kinds)} shapes; pad them to one length, or a few")
                self._kinds[key] = _Kind()
                return None
            kind = self._kinds[key]
            # Before the record, which looks at the user's module alone.
            self._setup.module.copy_follower.bring_changes()  # as a run would
            record = StepRecord(self._setup, self._optimizer, _tensors(leaves))
            if kind.record is not None and (change := kind.record.change(record)) is not None:
                self._forget(change)
            # Callbacks run between epochs, and may change what Python computes with: in each epoch one step is observed
            # again first (test_the_first_step_of_an_epoch_is_compared_again).
            if kind.alike and self._alike_in == epoch:
                kind.replay = kind.replay or self._capture(leaves, structure)
                outputs, metrics = kind.replay(leaves)
                self._setup.module.copy_follower.remember_replay()
            else:
                outputs, metrics = self._observe(kind, record, batch, epoch)
        except NotCapturableError as reason:
            self._give_up(reason)
            return None
        if any(metrics):
            self._strategy.run(update_metrics, (self._states, PerReplica(metrics)))
        return outputs

    def _begin(self, reason: str) -> None:
        """Before steps are observed anew, for ``reason``."""
        check_setup(self._setup, self._optimizer)
        self._beginnings += 1
        if self._beginnings > MAX_BEGINNINGS:
            raise NotCapturableError(reason)

    def _forget(self, change: str) -> None:
        """Drops all captured steps: what has changed for one kind may have changed for all."""
        self._begin(f"{change} changed between steps, again and again")
        for kind in self._kinds.values():
            kind.record, kind.alike, kind.replay = None, False, None
        self._pool = self._driver.graph_pool(self._device)  # torch captures no graph into the pool of the last one

    def _give_up(self, reason: object) -> None:
        _LOG.info("no CUDA graphs of whole steps: %s", reason)
        self._kinds.clear()  # frees the captured steps and their memory
        self._gave_up = True

    def _observe(self, kind: _Kind, record: StepRecord, batch: Any, epoch: int) -> _Results:
        """Runs a step as usual, and compares it with the one before of its kind."""
        states, metrics = self._without_metrics()
        with record:
            outputs = self._strategy.run(train_step, (self._setup, states, batch, True))
        difference = None if kind.record is None else kind.record.difference(record)
        if record.wait is not None:
            self._give_up(f"the step reads from the device: {record.wait}")
        elif difference is not None:
            self._give_up(f"steps differ from each other: {difference}")
        elif kind.record is not None:
            kind.alike, self._alike_in = True, epoch
        kind.record = record
        return self._strategy.local_results(outputs), metrics

    def _capture(self, leaves: list[Any], structure: Any) -> Callable[[list[Any]], _Results]:
        """Captures the step for batches like this one. Nothing is computed; the result runs the step on another one.

        A schedule writes its rates as numbers into the optimizer's groups. A captured step would keep those of its
        capture, so fused kernels read them from float32 tensors instead. If the device refuses, a NotCapturableError is
        raised, and everything is as it was before.
        """
        setup, strategy, storages = self._setup, self._strategy, self._optimizer.storages
        try:
            static_leaves = [_cloned(leaf) for leaf in leaves]  # there may be no memory for it
            inputs, shards = (
                _tensors(static_leaves),
                PerReplica(compat.tree_unflatten(static_leaves, structure)),
            )
            rates = [torch.zeros((), dtype=torch.float32, device=self._device) for _ in self._optimizer.param_groups]
            states, metrics = self._without_metrics()
            graph = self._driver.graph(self._device, strategy.generators.on_gpu(), self._pool)
            storages.rates = rates
            with graph.recording():
                results = strategy.run(train_step, (setup, states, shards, True))
        except Exception as error:  # an error of the user's code is raised again when the step runs as usual
            line = str(error).strip().split("\n", 1)[0]
            raise NotCapturableError(f"the step could not be captured: {type(error).__name__}: {line}") from error
        finally:
            storages.rates = None
            for duplicate in setup.module.copies:
                duplicate.zero_grad()
        outputs = strategy.local_results(results)

        def replay(leaves: list[Any]) -> _Results:
            if inputs:
                # The captured kernels read from fixed addresses, so the batch is copied there.
                compat.foreach_copy_(inputs, _tensors(leaves), non_blocking=True)
            for rate, group in zip(rates, self._optimizer.param_groups, strict=True):
                rate.fill_(group["lr"])
            graph.replay()
            # The next replay overwrites the numbers in the outputs, whose copy to the host is queued by then. What the
            # metrics get, and may keep, is copied.
            return outputs, [LaterMetrics(compat.tree_map(_cloned, list(updates))) for updates in metrics]

        return replay

    def _without_metrics(self) -> tuple[PerReplica[ReplicaState], list[LaterMetrics]]:
        """States for a step that updates no metric, and what it leaves for them."""
        states, metrics = list(map(copy.copy, self._states.values)), [LaterMetrics() for _ in self._states.values]
        for state, later in zip(states, metrics, strict=True):
            state.metrics = {"later": later} if state.metrics else {}
        return PerReplica(states), metrics


def _flat(batch: Any, strategy: Strategy) -> tuple[list[Any], Any]:
    """The leaves of a batch's shards, one per replica, and their structure.

    Raises a NotCapturableError for a leaf that has no fixed address on the device and cannot be compared.
    """
    replicas, device = len(strategy.devices), strategy.devices[0].torch_device
    leaves, structure = compat.tree_flatten([select(batch, replica, replicas) for replica in range(replicas)])
    for leaf in leaves:
        if not isinstance(leaf, (*_PLAIN, type(None))) and not (is_plain(leaf) and leaf.device == device):
            kind = f"{leaf.layout} tensor on {leaf.device}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise NotCapturableError(f"the batches hold a {kind}; give dense tensors, numbers or strings")
    return leaves, structure


def _form(leaf: Any) -> Hashable:
    """What a leaf has in common in two batches if one captured step serves both."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
