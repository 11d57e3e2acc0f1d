"""Captures a training step as one CUDA graph, and replays it.

    batch            -> copied to fixed addresses --.
    learning rates   -> tensors on the device ------+-- replay --> outputs, copied for the caller

A graph reads and writes the same memory each time. Metrics count in Python, so they are updated after the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep._torch_compat import foreach_copy_, tree_flatten, tree_map, tree_unflatten
from lockstep.collectives.per_replica import PerReplica, select
from lockstep.data.structure import is_plain
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.device.driver import DeviceGraph
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
        """The inputs of a step. Raises a NotCapturableError if one has no fixed address or cannot be compared."""
        shards = [select(batch, replica, replicas) for replica in range(replicas)]
        leaves, structure = tree_flatten(shards, is_leaf=lambda node: isinstance(node, PackedSequence))
        for leaf in leaves:
            if not is_plain(leaf) and not isinstance(leaf, (bool, int, float, complex, str, type(None))):
                kind = f"{leaf.layout} tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise NotCapturableError(f"the batches hold a {kind}; give dense tensors, numbers or strings")
        return cls(leaves, structure)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def shards(self) -> PerReplica[Any]:
        return PerReplica(tree_unflatten(self.leaves, self.structure))

    def signature(self) -> Hashable:
        """What two batches have in common if one captured step serves both."""
        forms: list[Hashable] = [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for leaf in self.leaves
        ]
        return self.structure, tuple(forms)

    def cloned(self) -> StepInputs:
        """The same, with copies of the tensors."""
        return StepInputs([each.clone() if isinstance(each, Tensor) else each for each in self.leaves], self.structure)


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
        if len(groups) != len(self._tensors) or any(isinstance(group["lr"], Tensor) for group in groups):
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
    outputs: tuple[StepOutput, ...]
    metrics: list[MetricInputs]
    guards: StepGuards

    def replay(self, inputs: StepInputs) -> tuple[tuple[StepOutput, ...], list[MetricInputs]]:
        """Runs the step on another batch of its signature.

        The next replay overwrites the numbers in the outputs, whose copy to the host is queued by then. What the
        metrics get, and may keep, is copied.
        """
        if self.inputs.tensors:
            foreach_copy_(self.inputs.tensors, inputs.tensors, non_blocking=True)
        self.rates.refresh()
        self.graph.replay()
        return self.outputs, tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.metrics)


def capture_step(
    setup: TrainSetup,
    states: PerReplica[ReplicaState],
    batch: StepInputs,
    rates: DeviceLearningRates,
    new_graph: Callable[[], DeviceGraph],
) -> CapturedStep:
    """Captures the step for batches like this one. Nothing is computed; replay it to run the step.

    If the device refuses, a NotCapturableError is raised, and everything is as it was before.
    """
    check_before_capture(setup)
    try:
        inputs = batch.cloned()  # there may be no memory for it
        rates.refresh()
        graph = new_graph()
        with deferring_metrics(states.values) as metrics, rates.in_groups(), graph.recording():
            outputs = setup.strategy.run(step_within, (graph.in_replica, setup, states, inputs.shards))
    except Exception as error:  # an error of the user's code is raised again when the step runs as usual
        line = str(error).strip().split("\n", 1)[0]
        raise NotCapturableError(f"the step could not be captured: {type(error).__name__}: {line}") from error
    finally:
        for state in states.values:
            state.take_sums()
        for copy in setup.module.copies:
            copy.zero_grad()
    return CapturedStep(
        graph=graph,
        inputs=inputs,
        rates=rates,
        outputs=setup.strategy.local_results(outputs),
        metrics=metrics,
        guards=StepGuards(setup),
    )


@wraps(train_step)  # so that the strategy's check of the first run of a step is not made again
def step_within(
    block: Callable[[], AbstractContextManager[Any]], setup: TrainSetup, state: ReplicaState, item: Any
) -> StepOutput:
    """A training step of one replica, in a block that captures or traces it."""
    with block():
        return train_step(setup, state, item, True)
