"""Records steps: all replicas run one step while their device records, and nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import SGD, Adam, AdamW
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.collectives.per_replica import PerReplica
from lockstep.data.structure import is_plain
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.device.cuda import DeviceGraph
from lockstep.replicas.device.driver import DeviceDriver
from lockstep.strategies.base import Strategy
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.guards import NotCapturableError, StepGuards
from lockstep.train.step import ReplicaState, StepOutput, train_step

Value = torch.Tensor | float | None


@dataclass(frozen=True)
class Snapshot:
    """The gradients and sums of all replicas at one moment. It keeps the tensors alive.

    Args:
        gradients: of every parameter of every replica.
        sums: of every replica the total and the count.
    """

    gradients: tuple[Value, ...]
    sums: tuple[Value, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that are tensors."""
        return [value for value in (*self.gradients, *self.sums) if isinstance(value, torch.Tensor)]

    @property
    def kind(self) -> Hashable:
        """What two snapshots have in common if a recorded step that began with one can begin with the other."""
        if not any(gradient is not None for gradient in self.gradients):
            return tuple(map(_form, self.sums))
        return tuple(map(_form, (*self.gradients, *self.sums)))

    def take(self, values: Snapshot) -> None:
        """Copies values of the same kind into these tensors."""
        pairs = zip((*self.gradients, *self.sums), (*values.gradients, *values.sums), strict=True)
        with torch.no_grad():
            for into, value in pairs:
                if isinstance(into, torch.Tensor) and isinstance(value, torch.Tensor) and into is not value:
                    into.copy_(value)


class CarriedState:
    """Reads and sets what is carried.

    Args:
        copies: each replica's copy of the module.
        states: each replica's state.
    """

    def __init__(self, copies: Sequence[nn.Module], states: Sequence[ReplicaState]) -> None:
        self._parameters = [parameter for copy in copies for parameter in copy.parameters()]
        self._states = states

    def now(self) -> Snapshot:
        """What is carried now."""
        sums: list[Any] = [value for state in self._states for value in (state.total, state.count)]
        with torch._C.DisableTorchFunction():  # what watches the step's calls would take this for the step's own look
            return Snapshot(tuple([parameter.grad for parameter in self._parameters]), tuple(sums))

    def put(self, snapshot: Snapshot, *, where_not: Snapshot | None = None) -> None:
        """Makes a snapshot the present.

        Args:
            snapshot: what is carried from now on.
            where_not: what is carried already; gradients that are the same there are not touched.
        """
        present = snapshot.gradients if where_not is None else where_not.gradients
        for parameter, old, new in zip(self._parameters, present, snapshot.gradients, strict=True):
            if where_not is None or old is not new:
                parameter.grad = new  # type: ignore[assignment]
        for state, total, count in zip(self._states, snapshot.sums[::2], snapshot.sums[1::2], strict=True):
            state.total, state.count = total, count  # type: ignore[assignment]


def _form(value: Value) -> Hashable:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


def signature(batch: Any) -> Hashable:
    """What two batches have in common if one recorded step serves both.

    Args:
        batch: nested tuples, lists and mappings of ``PerReplica`` and plain values.

    Raises:
        NotCapturableError: it holds something that cannot be compared.
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
            "numbers or text"
        ) from None
    return (type(batch), batch)


class StaticInputs:
    """A batch at fixed addresses, which other batches of the same signature are copied to.

    Args:
        batch: the first of them.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = tree_map(_fixed, batch)
        self._tensors = tensors(self.batch)

    def take(self, batch: Any) -> None:
        """Copies ``batch``, of the same signature, to the fixed addresses, on the current stream."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, tensors(batch), non_blocking=True)


def tensors(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(batch):
        # A replica's value may be a list of rows.
        values = tree_leaves(list(leaf)) if isinstance(leaf, PerReplica) else [leaf]
        found += [value for value in values if isinstance(value, torch.Tensor)]
    return found


def _fixed(leaf: Any) -> Any:
    if isinstance(leaf, PerReplica):
        return PerReplica([tree_map(_fixed, value) for value in leaf])
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


Change = Callable[[torch.Tensor], torch.Tensor]


def cloned_outputs(outputs: Any) -> Any:
    """The same structure with a copy of each tensor, made on the current stream; what was one tensor stays one.

    Args:
        outputs: nested dataclasses and whatever else torch knows as structure, such as transformers' outputs.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone()
        return copies[id(tensor)]

    return tree_map(partial(_of_leaf, copied), outputs)


def _of_leaf(change: Change, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        values = {each.name: getattr(leaf, each.name) for each in fields(leaf)}
        return replace(leaf, **tree_map(partial(_of_leaf, change), values))
    return leaf


FREE = ("lr",)
"""The hyperparameters that may change between replays."""


class DeviceLearningRates:
    """The learning rates of an optimizer's groups as tensors of one element, in float32, which fused kernels read.

    Args:
        optimizer: the mirrored one.
        device: where its parameters are.

    Raises:
        NotCapturableError: an optimizer whose kernels take the rate as a number, or count steps on the host.
    """

    def __init__(self, optimizer: MirroredOptimizer, device: torch.device) -> None:
        if optimizer.not_fused is not None:
            raise NotCapturableError(f"the update is not made by fused kernels: {optimizer.not_fused}")
        if type(optimizer.plain) not in (SGD, Adam, AdamW):
            raise NotCapturableError(
                f"{type(optimizer.plain).__name__} takes its learning rate as a number; Adam, AdamW and SGD do not"
            )
        self._optimizer = optimizer
        self._taken: list[float | None] = [None] * len(optimizer.param_groups)
        self._tensors = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]

    def refresh(self) -> None:
        """Writes the present rates to the device, on the current stream, where they are others than before.

        Raises:
            NotCapturableError: the optimizer has got another group, or a rate that is a tensor.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._tensors) or any(isinstance(group["lr"], torch.Tensor) for group in groups):
            raise NotCapturableError(
                "the optimizer's groups hold learning rates that are tensors, or there are more than before"
            )
        for index, (group, tensor) in enumerate(zip(groups, self._tensors, strict=True)):
            if group["lr"] != self._taken[index]:
                self._taken[index] = group["lr"]
                tensor.fill_(group["lr"])

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Inside the block the groups hold the tensors, and say that their kernels can be recorded."""
        groups = self._optimizer.param_groups
        names = ("lr", "capturable")
        before: list[dict[str, Any]] = [{name: group[name] for name in names if name in group} for group in groups]
        try:
            for group, tensor in zip(groups, self._tensors, strict=True):
                group["lr"] = tensor
                if "capturable" in group:
                    group["capturable"] = True  # torch asks for it, though fused kernels count on the device anyway
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)


class DeferredMetric:
    """Stands where a replica's metrics do, and keeps what they would have been updated with."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, Any] | None = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Called by the step as a metric's ``update``."""
        self.arguments = (outputs, targets)


@contextmanager
def deferring_metrics(states: Sequence[ReplicaState]) -> Iterator[list[DeferredMetric]]:
    """Inside the block steps update no metric; what they would have been given is in what the block gets.

    Args:
        states: one per replica.
    """
    kept = [DeferredMetric() for _ in states]
    metrics = [state.metrics for state in states]
    try:
        for state, keeps in zip(states, kept, strict=True):
            state.metrics = {"kept": keeps} if state.metrics else {}
        yield kept
    finally:
        for state, own in zip(states, metrics, strict=True):
            state.metrics = own


def update_metrics(strategy: Strategy, states: Sequence[ReplicaState], arguments: Sequence[Any]) -> None:
    """Updates every replica's metrics, in the replicas.

    Args:
        strategy: whose replicas.
        states: one per replica.
        arguments: per replica the outputs and targets; None where there was no row.
    """
    if any(state.metrics for state in states):
        strategy.run(_update, (PerReplica(list(states)), PerReplica([_Arguments(each) for each in arguments])))


class _Arguments:
    """Wrapped, so that nothing looks inside for values per replica."""

    def __init__(self, arguments: tuple[Any, Any] | None) -> None:
        self.arguments = arguments


def _update(state: ReplicaState, given: _Arguments) -> None:
    if given.arguments is None:
        return
    outputs, targets = given.arguments
    for name, metric in state.metrics.items():
        try:
            metric.update(outputs, targets)
        except Exception as error:
            error.add_note(f"metric {name!r}, updated with (outputs, targets)")
            raise


@dataclass(frozen=True)
class StepResults:
    """What a step of all replicas has left.

    Args:
        outputs: one per replica.
        metrics: per replica what its metrics are to be updated with; None for no rows or no metrics.
    """

    outputs: tuple[StepOutput, ...]
    metrics: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """A step under one signature.

    Args:
        graph: the recording.
        inputs: where it reads its batch.
        rates: where it reads learning rates.
        carried: reads and sets gradients and sums.
        entered: what was carried into the step; those tensors it reads.
        left: what was carried out of it; those tensors it writes.
        results: whose tensors it writes.
        standing: what else it takes for granted.
    """

    graph: DeviceGraph
    inputs: StaticInputs
    rates: DeviceLearningRates
    carried: CarriedState
    entered: Snapshot
    left: Snapshot
    results: StepResults
    standing: StepGuards

    def replay(self, batch: Any, entering: Snapshot) -> StepResults:
        """Runs the step on another batch. The tensors in the results are the caller's own.

        Args:
            batch: of the signature of the recorded one.
            entering: what is carried now, of the kind of ``entered``.
        """
        self.entered.take(entering)
        self.inputs.take(batch)
        self.rates.refresh()
        self.graph.replay()
        self.carried.put(self.left, where_not=entering)
        own: StepResults = cloned_outputs(self.results)
        return own


class GraphCapture:
    """Records the steps of one setup.

    Args:
        strategy: whose replicas, all of one device.
        setup: with an optimizer.
        states: one per replica.
        carried: what steps hand to each other.
        driver: of the device.

    Raises:
        NotCapturableError: the optimizer's step cannot be recorded.
    """

    def __init__(
        self,
        strategy: Strategy,
        setup: TrainSetup,
        states: PerReplica[ReplicaState],
        carried: CarriedState,
        driver: DeviceDriver,
    ) -> None:
        if setup.optimizer is None:
            raise NotCapturableError("there is no optimizer")
        self._strategy, self._setup, self._states, self._carried = strategy, setup, states, carried
        self._driver = driver
        self._device = strategy.devices[0].torch_device
        self._rates = DeviceLearningRates(setup.optimizer, self._device)
        self._graphs: WeakSet[DeviceGraph] = WeakSet()
        self._pool: Any = None

    def record(self, batch: Any, due: bool) -> CapturedStep:
        """A recording of the step on such a batch. The step has not been run; replay it.

        Raises:
            NotCapturableError: the device refused. All is as it was before.
        """
        before = self._carried.now()
        if not self._graphs:  # the last of a pool's graphs takes it along: torch records no other one there
            self._pool = self._driver.graph_pool(self._device)
        try:
            inputs = StaticInputs(batch)  # for which there may be no memory
            self._rates.refresh()
            graph = self._driver.graph(self._device, self._strategy.generators.on_gpu(), self._pool)
            results = self._run(graph, inputs.batch, due)
        except Exception as error:  # an error of the program's own comes again, in the step that is run as it is
            self._carried.put(before)
            raise NotCapturableError(
                f"the step could not be recorded: {type(error).__name__}: {_first_line(error)}"
            ) from error
        except BaseException:
            self._carried.put(before)
            raise
        self._graphs.add(graph)
        after = self._carried.now()
        self._carried.put(before)
        return CapturedStep(
            graph=graph,
            inputs=inputs,
            rates=self._rates,
            carried=self._carried,
            entered=before,
            left=after,
            results=results,
            standing=StepGuards(self._setup, FREE),
        )

    def _run(self, graph: DeviceGraph, batch: Any, due: bool) -> StepResults:
        strategy = self._strategy
        with deferring_metrics(self._states.values) as kept, self._rates.instead(), graph.recording():
            found = strategy.run(_recorded_step, (graph, self._setup, self._states, batch, due))
        return StepResults(strategy.local_results(found), [each.arguments for each in kept])


@wraps(train_step)  # what the first run of a step is looked at for has been looked at
def _recorded_step(graph: DeviceGraph, setup: TrainSetup, state: ReplicaState, item: Any, update: bool) -> StepOutput:
    with graph.in_replica():
        return train_step(setup, state, item, update)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
