"""Captures a training step as one CUDA graph, and replays it.

    batch            -> copied to fixed addresses --.
    learning rates   -> tensors on the device ------+-- replay --> outputs, copied for the caller

A graph reads and writes the same memory each time. Metrics count in Python, so they are updated after the replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import wraps
from typing import Any, Self

import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep._torch_compat import foreach_copy_, tree_flatten, tree_map, tree_unflatten
from lockstep.collectives.per_replica import PerReplica, select
from lockstep.data.structure import is_plain
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.device.driver import DeviceDriver, DeviceGraph
from lockstep.train.compile import TrainSetup
from lockstep.train.cuda_graphs.guards import NotCapturableError, StepGuards, check_before_capture
from lockstep.train.step import MetricInputs, ReplicaState, StepOutput, train_step


@dataclass(frozen=True)
class StepInputs:
    """The shards of a batch, one per replica, as leaves and their structure."""

    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, batch: Any, replicas: int) -> Self:
        """The inputs of a step on a sharded batch.

        Raises:
            NotCapturableError: the batch holds something that has no fixed address, or that cannot be compared.
        """
        shards = [select(batch, replica, replicas) for replica in range(replicas)]
        leaves, structure = tree_flatten(shards, is_leaf=lambda node: isinstance(node, PackedSequence))
        for leaf in leaves:
            if not is_plain(leaf) and not isinstance(leaf, (bool, int, float, complex, str, type(None))):
                kind = f"{leaf.layout} tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise NotCapturableError(f"the batches hold a {kind}; give dense tensors, numbers or strings")
        return cls(leaves, structure)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def shards(self) -> PerReplica[Any]:
        return PerReplica(tree_unflatten(self.leaves, self.structure))

    def signature(self) -> Hashable:
        """What two batches have in common if one captured step serves both."""
        forms: list[Hashable] = [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
            if isinstance(leaf, torch.Tensor)
            else (type(leaf), leaf)
            for leaf in self.leaves
        ]
        return self.structure, tuple(forms)

    def cloned(self) -> StepInputs:
        """The same, with copies of the tensors."""
        return StepInputs(
            [each.clone() if isinstance(each, torch.Tensor) else each for each in self.leaves], self.structure
        )


@dataclass(frozen=True)
class StepResults:
    """What a step of all replicas returns: the output of each, and what its metrics are to be updated with."""

    outputs: tuple[StepOutput, ...]
    metrics: list[MetricInputs]

    def copied(self) -> StepResults:
        """The same with one copy of each tensor, made on the current stream."""
        copies: dict[int, torch.Tensor] = {}

        def copy(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in copies:
                    copies[id(leaf)] = leaf.detach().clone()
                return copies[id(leaf)]
            if is_dataclass(leaf) and not isinstance(leaf, type):
                return replace(leaf, **tree_map(copy, dict(vars(leaf))))
            return leaf

        return StepResults(*tree_map(copy, (self.outputs, self.metrics)))


class DeviceLearningRates:
    """The learning rates of an optimizer's groups as float32 tensors of one element, which fused kernels read.

    A scheduler writes a float into the groups. A captured step would keep the float of its capture, so the groups hold
    tensors during the capture, and the floats are copied there before each replay.
    """

    def __init__(self, optimizer: MirroredOptimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._tensors = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]

    def refresh(self) -> None:
        """Copies the rates to the device, on the current stream."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._tensors) or any(isinstance(group["lr"], torch.Tensor) for group in groups):
            raise NotCapturableError("the optimizer has a new parameter group, or a learning rate that is a tensor")
        for group, tensor in zip(groups, self._tensors, strict=True):
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


@contextmanager
def deferring_metrics(states: Sequence[ReplicaState]) -> Iterator[list[MetricInputs]]:
    """Steps in the block update no metric. The lists that it gives get what the metrics of each replica are to get."""
    deferred: list[MetricInputs] = [[] for _ in states]
    for state, own in zip(states, deferred, strict=True):
        state.deferred = own
    try:
        yield deferred
    finally:
        for state in states:
            state.deferred = None


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """A captured step, for batches of one signature: what it reads, what it writes, and what else it depends on."""

    graph: DeviceGraph
    inputs: StepInputs
    rates: DeviceLearningRates
    results: StepResults
    guards: StepGuards

    def replay(self, inputs: StepInputs) -> StepResults:
        """Runs the step on another batch of its signature. The tensors in the results are copies."""
        if self.inputs.tensors:
            foreach_copy_(self.inputs.tensors, inputs.tensors, non_blocking=True)
        self.rates.refresh()
        self.graph.replay()
        return self.results.copied()


class GraphCapture:
    """Captures the steps of one fit, whose replicas are all on one device."""

    def __init__(self, setup: TrainSetup, states: PerReplica[ReplicaState], driver: DeviceDriver) -> None:
        self._setup, self._states, self._driver = setup, states, driver
        self._device = setup.strategy.devices[0].torch_device
        assert setup.optimizer is not None
        self._rates = DeviceLearningRates(setup.optimizer, self._device)
        self.new_pool()

    def new_pool(self) -> None:
        """To be called when all graphs are dropped: torch captures no other graph into the pool of the last one."""
        self._pool = self._driver.graph_pool(self._device)

    def capture(self, batch: StepInputs) -> CapturedStep:
        """Captures the step for batches like this one. Nothing is computed; replay it to run the step.

        If the device refuses, a NotCapturableError is raised, and everything is as it was before.
        """
        check_before_capture(self._setup)
        strategy = self._setup.strategy
        try:
            inputs = batch.cloned()  # there may be no memory for it
            self._rates.refresh()
            graph = self._driver.graph(self._device, strategy.generators.on_gpu(), self._pool)
            with deferring_metrics(self._states.values) as metrics, self._rates.in_groups(), graph.recording():
                outputs = strategy.run(_captured_step, (graph, self._setup, self._states, inputs.shards))
        except Exception as error:  # an error of the user's code is raised again when the step runs as usual
            line = str(error).strip().split("\n", 1)[0]
            raise NotCapturableError(f"the step could not be captured: {type(error).__name__}: {line}") from error
        finally:
            for state in self._states.values:
                state.reset_sums()
            for copy in self._setup.module.copies:
                copy.zero_grad()
        results = StepResults(strategy.local_results(outputs), metrics)
        guards = StepGuards(self._setup)
        return CapturedStep(graph=graph, inputs=inputs, rates=self._rates, results=results, guards=guards)


@wraps(train_step)  # so that the strategy's check of the first run of a step is not made again
def _captured_step(graph: DeviceGraph, setup: TrainSetup, state: ReplicaState, item: Any) -> StepOutput:
    with graph.in_replica():
        return train_step(setup, state, item, True)
