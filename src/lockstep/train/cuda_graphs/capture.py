"""Captures a training step as one CUDA graph, and replays it.

    batch                       -> copied to fixed addresses --.
    learning rates              -> tensors on the device ------+-- replay --> outputs, copied for the caller
    gradients and sums so far   -> tensors at fixed addresses -'         `--> gradients and sums, at fixed addresses

A graph reads and writes the same memory each time. Metrics count in Python, so they are updated after the replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import SGD, Adam, AdamW

from lockstep._torch_compat import DisableTorchFunction, foreach_copy_, tree_leaves, tree_map
from lockstep.collectives.per_replica import PerReplica
from lockstep.data.structure import is_plain
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.device.driver import DeviceDriver, DeviceGraph
from lockstep.strategies.base import Strategy
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.guards import NotCapturableError, StepGuards
from lockstep.train.step import ReplicaState, StepOutput, train_step, update_metrics_of

Value = torch.Tensor | float | None


def signature(batch: Any) -> Hashable:
    """What two batches of tuples, lists, mappings and values have in common if one captured step serves both.

    Raises:
        NotCapturableError: the batch holds something that cannot be compared.
    """
    if isinstance(batch, PackedSequence) or (isinstance(batch, torch.Tensor) and not is_plain(batch)):
        raise NotCapturableError("the batches hold sparse, nested or packed tensors, which have no fixed address")
    if isinstance(batch, torch.Tensor):
        return (batch.shape, batch.stride(), batch.dtype, batch.device)
    if isinstance(batch, Mapping):
        return (type(batch), tuple((key, signature(value)) for key, value in batch.items()))
    if isinstance(batch, (tuple, list, PerReplica)):
        return (type(batch), tuple(signature(value) for value in batch))
    try:
        hash(batch)
    except TypeError:
        raise NotCapturableError(
            f"the batches hold a {type(batch).__name__}, which cannot be compared with the next one; give tensors, "
            "numbers or strings"
        ) from None
    return (type(batch), batch)


def tensors(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(batch):
        values = tree_leaves(list(leaf)) if isinstance(leaf, PerReplica) else [leaf]  # a replica's may be a list
        found += [value for value in values if isinstance(value, torch.Tensor)]
    return found


class StaticInputs:
    """A copy of a batch, at fixed addresses."""

    def __init__(self, batch: Any) -> None:
        self.batch = tree_map(_cloned, batch)
        self._tensors = tensors(self.batch)

    def take(self, batch: Any) -> None:
        """Copies a batch of the same signature to the fixed addresses, on the current stream."""
        if self._tensors:
            foreach_copy_(self._tensors, tensors(batch), non_blocking=True)


def _cloned(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica):
        return PerReplica([tree_map(_cloned, value) for value in leaf])
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def cloned_outputs(outputs: Any) -> Any:
    """The same structure, also of dataclasses, with one copy of each tensor, made on the current stream."""
    copies: dict[int, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.detach().clone()
            return copies[id(leaf)]
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return replace(leaf, **tree_map(copied, {each.name: getattr(leaf, each.name) for each in fields(leaf)}))
        return leaf

    return tree_map(copied, outputs)


@dataclass(frozen=True)
class Snapshot:
    """The gradients of all parameters, and the total and count of each replica, at one moment."""

    gradients: tuple[Value, ...]
    sums: tuple[Value, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those values that are tensors."""
        return [value for value in (*self.gradients, *self.sums) if isinstance(value, torch.Tensor)]

    @property
    def kind(self) -> Hashable:
        """Equal for two snapshots if a step that was captured after one can be replayed after the other."""
        if all(gradient is None for gradient in self.gradients):
            return tuple(map(_form, self.sums))
        return tuple(map(_form, (*self.gradients, *self.sums)))

    def take(self, values: Snapshot) -> None:
        """Copies the values of a snapshot of the same kind into these tensors."""
        pairs = zip((*self.gradients, *self.sums), (*values.gradients, *values.sums), strict=True)
        with torch.no_grad():
            for into, value in pairs:
                if isinstance(into, torch.Tensor) and isinstance(value, torch.Tensor) and into is not value:
                    into.copy_(value)


def _form(value: Value) -> Hashable:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


class CarriedState:
    """What one step hands to the next besides weights: gradients that wait for their update, and the sums of losses."""

    def __init__(self, copies: Sequence[nn.Module], states: Sequence[ReplicaState]) -> None:
        self._parameters = [parameter for copy in copies for parameter in copy.parameters()]
        self._states = states

    def now(self) -> Snapshot:
        """A snapshot of the present state."""
        sums: list[Any] = [value for state in self._states for value in (state.total, state.count)]
        with DisableTorchFunction():  # a mode that watches the step must not see this read of the gradients
            return Snapshot(tuple([parameter.grad for parameter in self._parameters]), tuple(sums))

    def put(self, snapshot: Snapshot, *, present: Snapshot | None = None) -> None:
        """Makes a snapshot the present state. Gradients that are the same in ``present`` are not touched."""
        old_gradients = snapshot.gradients if present is None else present.gradients
        for parameter, old, new in zip(self._parameters, old_gradients, snapshot.gradients, strict=True):
            if present is None or old is not new:
                parameter.grad = new  # type: ignore[assignment]
        for state, total, count in zip(self._states, snapshot.sums[::2], snapshot.sums[1::2], strict=True):
            state.total, state.count = total, count  # type: ignore[assignment]


class DeviceLearningRates:
    """The learning rates of an optimizer's groups as float32 tensors of one element, which fused kernels read.

    A scheduler writes a float into the groups. A captured step would keep the float of its capture, so the groups hold
    tensors during the capture, and the floats are copied there before each replay.

    Raises:
        NotCapturableError: the optimizer's kernels take the rate as a number, or count steps on the host.
    """

    def __init__(self, optimizer: MirroredOptimizer, device: torch.device) -> None:
        if optimizer.storages.not_fused is not None:
            raise NotCapturableError(f"the update is not made by fused kernels: {optimizer.storages.not_fused}")
        if type(optimizer.plain) not in (SGD, Adam, AdamW):
            raise NotCapturableError(
                f"{type(optimizer.plain).__name__} takes its learning rate as a number; Adam, AdamW and SGD do not"
            )
        self._optimizer = optimizer
        self._copied: list[float | None] = [None] * len(optimizer.param_groups)
        self._tensors = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]

    def refresh(self) -> None:
        """Copies the rates that have changed to the device, on the current stream."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._tensors) or any(isinstance(group["lr"], torch.Tensor) for group in groups):
            raise NotCapturableError("the optimizer has a new parameter group, or a learning rate that is a tensor")
        for index, (group, tensor) in enumerate(zip(groups, self._tensors, strict=True)):
            if group["lr"] != self._copied[index]:
                self._copied[index] = group["lr"]
                tensor.fill_(group["lr"])

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """Puts the tensors into the optimizer's groups for the length of the block."""
        groups = self._optimizer.param_groups
        before: list[dict[str, Any]] = [
            {name: group[name] for name in ("lr", "capturable") if name in group} for group in groups
        ]
        try:
            for group, tensor in zip(groups, self._tensors, strict=True):
                group["lr"] = tensor
                if "capturable" in group:
                    group["capturable"] = True  # torch requires it, though fused kernels count on the device anyway
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)


class DeferredMetric:
    """Takes the place of a replica's metrics in a step, and keeps what they would have been updated with."""

    def __init__(self, arguments: tuple[Any, Any] | None = None) -> None:
        self.arguments = arguments

    def update(self, outputs: Any, targets: Any) -> None:
        """Called by the step."""
        self.arguments = (outputs, targets)


@contextmanager
def deferring_metrics(states: Sequence[ReplicaState]) -> Iterator[list[DeferredMetric]]:
    """Steps in the block update no metric. The list that it gives has the updates, one per replica."""
    deferred = [DeferredMetric() for _ in states]
    metrics = [state.metrics for state in states]
    try:
        for state, instead in zip(states, deferred, strict=True):
            state.metrics = {"deferred": instead} if state.metrics else {}
        yield deferred
    finally:
        for state, own in zip(states, metrics, strict=True):
            state.metrics = own


def update_metrics(strategy: Strategy, states: Sequence[ReplicaState], deferred: Sequence[DeferredMetric]) -> None:
    """Makes the deferred updates of the metrics, in the replicas."""
    if any(state.metrics for state in states):
        strategy.run(_update_metrics, (PerReplica(list(states)), PerReplica(list(deferred))))


def _update_metrics(state: ReplicaState, deferred: DeferredMetric) -> None:
    if deferred.arguments is not None:
        update_metrics_of(state, *deferred.arguments)


@dataclass(frozen=True)
class StepResults:
    """What a step of all replicas returns: the output and the update of the metrics of each replica."""

    outputs: tuple[StepOutput, ...]
    metrics: Sequence[DeferredMetric]


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """A captured step, for batches of one signature."""

    graph: DeviceGraph
    inputs: StaticInputs
    rates: DeviceLearningRates
    carried: CarriedState
    entered: Snapshot  # the gradients and sums that it reads
    left: Snapshot  # the gradients and sums that it writes
    results: StepResults  # the outputs that it writes
    guards: StepGuards  # what else it depends on

    def replay(self, batch: Any, entering: Snapshot) -> StepResults:
        """Runs the step on another batch of its signature, with the present gradients and sums, of the kind of its own.

        The tensors in the results are copies.
        """
        self.entered.take(entering)
        self.inputs.take(batch)
        self.rates.refresh()
        self.graph.replay()
        self.carried.put(self.left, present=entering)
        outputs, arguments = cloned_outputs((self.results.outputs, [each.arguments for each in self.results.metrics]))
        return StepResults(outputs, list(map(DeferredMetric, arguments)))


class GraphCapture:
    """Captures the steps of one fit, whose replicas are all on one device.

    Raises:
        NotCapturableError: the optimizer's update cannot be captured.
    """

    def __init__(
        self, setup: TrainSetup, states: PerReplica[ReplicaState], carried: CarriedState, driver: DeviceDriver
    ) -> None:
        if setup.optimizer is None:
            raise NotCapturableError("there is no optimizer")
        self._strategy, self._setup, self._states, self._carried = setup.strategy, setup, states, carried
        self._driver = driver
        self._device = setup.strategy.devices[0].torch_device
        self._rates = DeviceLearningRates(setup.optimizer, self._device)
        self._graphs: WeakSet[DeviceGraph] = WeakSet()
        self._pool: Any = None

    def capture(self, batch: Any, due: bool) -> CapturedStep:
        """Captures the step for batches like this one. Nothing is computed; replay it to run the step.

        If the device refuses, a NotCapturableError is raised, and everything is as it was before.
        """
        before = self._carried.now()
        if not self._graphs:  # a pool ends with the last of its graphs: torch captures no other graph into it
            self._pool = self._driver.graph_pool(self._device)
        try:
            inputs = StaticInputs(batch)  # there may be no memory for it
            self._rates.refresh()
            graph = self._driver.graph(self._device, self._strategy.generators.on_gpu(), self._pool)
            with deferring_metrics(self._states.values) as metrics, self._rates.in_groups(), graph.recording():
                found = self._strategy.run(_captured_step, (graph, self._setup, self._states, inputs.batch, due))
            results = StepResults(self._strategy.local_results(found), metrics)
            left = self._carried.now()
        except Exception as error:  # an error of the user's code is raised again when the step runs as usual
            line = str(error).strip().split("\n", 1)[0]
            raise NotCapturableError(f"the step could not be captured: {type(error).__name__}: {line}") from error
        finally:
            self._carried.put(before)
        self._graphs.add(graph)
        return CapturedStep(
            graph=graph,
            inputs=inputs,
            rates=self._rates,
            carried=self._carried,
            entered=before,
            left=left,
            results=results,
            guards=StepGuards(self._setup, free=("lr",)),  # read from a tensor
        )


@wraps(train_step)  # so that the strategy's check of the first run of a step is not made again
def _captured_step(graph: DeviceGraph, setup: TrainSetup, state: ReplicaState, item: Any, update: bool) -> StepOutput:
    with graph.in_replica():
        return train_step(setup, state, item, update)
