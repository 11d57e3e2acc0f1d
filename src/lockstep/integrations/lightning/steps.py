"""Runs the steps of a LightningModule on all replicas.

batch -> shards -> in each replica: copy.training_step(shard) -> loss, logged values, changes of attributes
                                     rules (rules.py)            `-> those of the batch
backward                             each replica's loss, times its weight in the loss of the batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep._torch_compat import DisableTorchFunction, tree_leaves, tree_map
from lockstep.collectives.communicator import all_gather_object
from lockstep.collectives.per_replica import PerReplica, select
from lockstep.data.batch_lists import ListReader
from lockstep.data.error_notes import WithRows
from lockstep.data.readers import batch_digest
from lockstep.data.sharding import LocalRows, batch_rows, local_rows, local_shards, split_batch
from lockstep.errors import UsageError
from lockstep.integrations.lightning.attributes import AttributeWatch, Change, Place, joined_changes
from lockstep.integrations.lightning.joined import joined
from lockstep.integrations.lightning.logged import Key, Logged, Recorder, give, recorder
from lockstep.integrations.lightning.metrics import metrics_alone
from lockstep.integrations.lightning.rules import LOSS, Comparisons, Rules, compared, of_plain, plain, rule_of_loss
from lockstep.integrations.lightning.values import Part, combined, tolerance_of, weights_of
from lockstep.mirroring.module.batch_norm import normalising_single_row
from lockstep.mirroring.module.module import MirroredModule
from lockstep.strategies.base import Strategy
from lockstep.train.batch import checked_alone, keeping_modes, replica_of_step
from lockstep.train.loss_reduction import ReductionTracer
from lockstep.watch.loss_parts import FAILURES


@dataclass(frozen=True, kw_only=True)
class Shard(WithRows):
    """One replica's shard of a batch."""

    batch: Any
    rows: int


@dataclass(kw_only=True)
class Outcome:
    """What a step gave in one replica."""

    rows: int
    output: Any = None  # what it returned, but for the loss
    loss: Tensor | None = None
    count: float | None = None  # what the loss is a mean over, if that was traced
    logged: dict[Key, Logged] = field(default_factory=dict)
    changes: dict[Place, Change] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """The same in plain values, for other workers."""
        loss = None if self.loss is None else self.loss.detach().cpu()
        logged = [(key, call.to_plain()) for key, call in self.logged.items()]
        return {"rows": self.rows, "output": self.output, "loss": loss, "count": self.count, "logged": logged}

    @classmethod
    def of_plain(cls, values: dict[str, Any]) -> Outcome:
        """The outcome that another worker has made plain."""
        logged = {tuple(key): Logged(**call) for key, call in values["logged"]}
        return cls(**{**values, "logged": logged})

    def parts(self) -> dict[str, Part]:
        """The numbers of the step by name: of the loss, of what was logged, and of attributes."""
        numbers: dict[str, Part] = {}
        if self.loss is not None:
            numbers[LOSS] = Part(value=self.loss.detach(), rows=self.rows, count=self.count)
        for logged in self.logged.values():
            if logged.is_number:
                numbers.setdefault(logged.name, logged.part(self.rows))
        for (_, name), change in self.changes.items():
            if change.kind == "number":
                numbers.setdefault(f"self.{name}", Part(value=change.value, rows=self.rows))
        return numbers


class ModuleSteps:
    """The steps of a mirrored LightningModule.

    Args:
        strategy: the strategy.
        mirrored: the module.
        watched: the parts of each copy whose attributes are joined.
        ignored: attributes that are Lightning's own.
    """

    def __init__(
        self,
        strategy: Strategy,
        mirrored: MirroredModule,
        watched: Sequence[Sequence[nn.Module]],
        ignored: frozenset[str],
    ) -> None:
        self._strategy, self._mirrored = strategy, mirrored
        self._watched, self._ignored = watched, ignored
        self._readers: dict[str, ListReader] = {}
        self._rules: dict[str, Rules] = {}
        self._gradients: list[list[tuple[nn.Parameter, Tensor]]] = [[] for _ in mirrored.copies]
        self._factor = 1.0

    def run(
        self, trainer: Any, name: str, batch: Any, rest: tuple[Any, ...], *, factor: float = 1.0
    ) -> tuple[Tensor | None, Any]:
        """Runs a step, such as "training_step", on a batch. Returns the loss, without gradients, and other outputs.

        Every worker must call it.

        Args:
            trainer: gets what was logged.
            name: of the module's method.
            batch: the whole batch, equal on all workers.
            rest: the other arguments of the method.
            factor: by which the loss is probably multiplied before ``backward``.
        """
        self._factor = factor
        replicas = self._strategy.num_replicas_in_sync
        key = f"{name} {rest[1:]}"  # of each data loader
        rules, reader = self._rules.setdefault(key, Rules(replicas)), self._readers.setdefault(key, self._reader())
        shards, total = self._divided(batch, reader)
        alone = total < replicas  # one replica has the whole batch
        largest = total if alone else math.ceil(total / replicas)  # of all workers, which compare together
        if replicas > 1 and largest > 1 and rules.is_due():
            self._compare(name, shards, rest, rules, reader)
        # Without sums after it: the gradients are no one's yet.
        with self._mirrored.no_sync():
            results = self._strategy.run(self._in_replica, (name, shards, rest, rules.by_name, alone))
        local: Sequence[Outcome] = self._strategy.local_results(results)
        outcomes = [outcome for outcome in self._of_all_workers(local) if outcome.rows]
        rows = [outcome.rows for outcome in outcomes]
        device = self._strategy.devices[0].torch_device
        if trainer._results is not None:
            give(trainer, [outcome.logged for outcome in outcomes], rows, rules.by_name, device)
        output = joined([outcome.output for outcome in outcomes], rows, device, f"the output of {name}")
        parts = [part for outcome in outcomes if (part := outcome.parts().get(LOSS)) is not None]
        if not parts:
            return None, output
        return torch.as_tensor(combined(rule_of_loss(parts, rules.by_name), parts, device), device=device), output

    def _reader(self) -> ListReader:
        return ListReader(records_are_rows=True, copies=self._strategy.workers.any_layout)

    def _divided(self, batch: Any, reader: ListReader) -> tuple[PerReplica[Shard], int]:
        """The local shards, and the rows of the whole batch."""
        workers = self._strategy.workers
        if not workers.is_single:
            workers.add_digest(batch_digest(batch))
        if workers.num_replicas == 1:
            return PerReplica([Shard(batch=batch, rows=1)]), 1
        rows = 0

        def cut(total: int) -> LocalRows:
            nonlocal rows
            rows = total
            if total >= workers.num_replicas:
                return local_rows(total, workers)
            # Fewer rows than replicas: one replica has them all, and need not wait for others in its metrics.
            first = workers.first_replica == 0
            return LocalRows(
                start=0 if first else total,
                sizes=(total if first else 0, *[0] * (workers.replicas[workers.index] - 1)),
            )

        divided = local_shards(batch, cut, reader)
        sizes = cut(rows).sizes
        shards = [Shard(batch=select(divided, replica, len(sizes)), rows=size) for replica, size in enumerate(sizes)]
        return PerReplica(shards), rows

    # In a replica.

    def _in_replica(
        self, name: str, shard: Shard, rest: tuple[Any, ...], rules: Mapping[str, str], alone: bool
    ) -> Outcome:
        context = replica_of_step()
        watch = AttributeWatch(self._watched[context.local_replica], self._ignored)
        outcome = Outcome(rows=0)
        if shard.rows:
            with metrics_alone() if alone else _nothing():
                outcome = self._call(name, shard.batch, shard.rows, rest)
                outcome.changes = watch.changes()
        if name == "training_step":
            self._back_propagate(outcome, rules)
        self._join_attributes(watch, outcome, rules)
        return outcome

    def _back_propagate(self, outcome: Outcome, rules: Mapping[str, str]) -> None:
        """Puts the gradients of this replica's part of the loss aside. Every replica must call it."""
        context = replica_of_step()

        def weigh(parts: list[tuple[int, Part | None]]) -> list[float]:
            plain = [(rows, None if part is None else (part.number, part.count)) for rows, part in parts]
            everyones = [
                (rows, None if part is None else Part(value=part[0], rows=rows, count=part[1]))
                for worker in all_gather_object(context.workers, "losses of a step", plain)
                for rows, part in worker
            ]
            losses = [part for _, part in everyones if part is not None]
            if len(losses) not in (0, sum(rows > 0 for rows, _ in everyones)):
                raise UsageError(
                    f"training_step returned a loss in {len(losses)} replicas and None in the others; one device skips "
                    "the whole batch or nothing of it: return a loss of zero instead of None"
                )
            weights = iter(weights_of(rule_of_loss(losses, rules), losses) if losses else ())
            return [0.0 if part is None else next(weights) for _, part in everyones]

        part = outcome.parts().get(LOSS)
        weight = context.meet("losses of a step", (outcome.rows, part), weigh)[context.replica_id_in_sync_group]
        gradients = self._gradients[context.local_replica] = []
        if outcome.loss is None or not weight:
            return
        weights = [
            weight for weight in self._mirrored.copies[context.local_replica].parameters() if weight.requires_grad
        ]
        with DisableTorchFunction():  # otherwise a read of .grad asks for the sums of all replicas
            former = [weight.grad for weight in weights]
            for parameter in weights:
                parameter.grad = None
        try:
            torch.autograd.backward(outcome.loss, torch.full_like(outcome.loss, weight * self._factor))
        finally:
            outcome.loss = outcome.loss.detach()
            with DisableTorchFunction():
                for parameter, gradient in zip(weights, former, strict=True):
                    if parameter.grad is not None:
                        gradients.append((parameter, parameter.grad))
                    parameter.grad = gradient

    def _join_attributes(self, watch: AttributeWatch, outcome: Outcome, rules: Mapping[str, str]) -> None:
        """Gives all copies the attributes that one device has. Every replica must call it."""
        context = replica_of_step()
        if context.num_replicas_in_sync == 1:
            return

        def join(values: list[tuple[int, dict[Place, Change]]]) -> dict[Place, Change]:
            workers = context.workers
            changed = any(changes for _, changes in values)
            if not workers.is_single:
                flags = workers.all_gather_numbers("whether a step sets attributes", [float(changed)])
                changed = any(flag for (flag,) in flags)
            if not changed:
                return {}
            plain = [
                (rows, [(place, change.kind, change.value) for place, change in items.items()])
                for rows, items in values
            ]
            everyones = all_gather_object(workers, "what a step sets", plain)
            with_rows = [
                (rows, {tuple(place): Change(kind, value) for place, kind, value in items})
                for worker in everyones
                for rows, items in worker
                if rows
            ]
            device = self._strategy.devices[0].torch_device
            return joined_changes([changes for _, changes in with_rows], [rows for rows, _ in with_rows], rules, device)

        changes = context.meet("attributes set by a step", (outcome.rows, outcome.changes), join)
        watch.apply(changes, context.device.torch_device)

    def _call(self, name: str, batch: Any, rows: int, rest: tuple[Any, ...]) -> Outcome:
        """Calls the step of this replica's copy."""
        context = replica_of_step()
        copy: Any = self._mirrored.copies[context.local_replica]
        device = context.device.torch_device
        batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
        self._mirrored.note_pass()
        tracer = ReductionTracer()
        calls = Recorder(partial(_count_of, tracer))
        token = recorder.set(calls)
        try:
            with tracer, normalising_single_row(copy, (batch,), {}):
                output = getattr(copy, name)(batch, *rest)
        finally:
            recorder.reset(token)
        outcome = Outcome(rows=rows, output=output, logged=calls.calls)
        if name == "training_step":
            self._take_loss(outcome, tracer)
        outcome.output = _detached(outcome.output)
        return outcome

    @staticmethod
    def _take_loss(outcome: Outcome, tracer: ReductionTracer) -> None:
        output = outcome.output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None or not isinstance(loss, Tensor):
            return  # Lightning says what it may return
        if loss.numel() != 1:
            raise UsageError(f"training_step returned a loss of shape {tuple(loss.shape)}; return one number")
        outcome.loss, outcome.count = loss.squeeze(), _count_of(tracer, loss)
        if isinstance(output, Mapping):
            outcome.output = {key: value for key, value in output.items() if key != "loss"}
        else:
            outcome.output = None
        for key, logged in outcome.logged.items():
            # A number that was read from the loss, self.log("loss", loss.item()), is a mean over the same.
            is_loss = logged.count is None and _number(logged.value) == _number(loss)
            if is_loss and outcome.count is not None:
                outcome.logged[key] = Logged(**{**vars(logged), "count": outcome.count})

    # Rules.

    def _compare(
        self, name: str, shards: PerReplica[Shard], rest: tuple[Any, ...], rules: Rules, reader: ListReader
    ) -> None:
        """Finds out how the numbers of a step are combined. Every worker must call it."""
        results = self._strategy.run(self._compare_in_replica, (name, shards, rest, reader))
        local: Sequence[Comparisons] = self._strategy.local_results(results)
        everyones = all_gather_object(self._strategy.workers, "the comparison of a step", [plain(c) for c in local])
        rules.decide([of_plain(values) for worker in everyones for values in worker], name)

    def _compare_in_replica(self, name: str, shard: Shard, rest: tuple[Any, ...], reader: ListReader) -> Comparisons:
        """Compares the numbers of a shard with those of its halves, if that can be done."""
        if shard.rows < 2:
            return Comparisons()
        context = replica_of_step()
        copy = self._mirrored.copies[context.local_replica]
        watch = AttributeWatch(self._watched[context.local_replica], self._ignored, containers=True)
        states = {name: buffer.clone() for name, buffer in copy.named_buffers()}
        try:
            with ExitStack() as blocks:
                for block in (
                    torch.no_grad(),
                    keeping_modes(copy),
                    checked_alone(context),
                    metrics_alone(compared=True),
                ):
                    blocks.enter_context(block)
                copy.eval()
                if name == "training_step":
                    self._show_training(watch, lambda: self._call(name, shard.batch, shard.rows, rest))
                outcomes: list[Outcome] = []
                containers: list[str] = []
                for batch in (shard.batch, *split_batch(shard.batch, 2, reader)):
                    rows = shard.rows if batch is shard.batch else batch_rows(reader.marked(batch))
                    outcome = self._call(name, batch, rows, rest)
                    outcome.changes = watch.changes()
                    containers = containers or watch.changed_containers()
                    watch.undo()
                    outcomes.append(outcome)
        except FAILURES:  # the step itself raises it, or calls collectives
            return Comparisons()
        finally:
            watch.undo()
            for name, buffer in copy.named_buffers():
                if not torch.equal(buffer, states[name]):
                    buffer.data.copy_(states[name])
        whole, *halves = outcomes
        tolerance = tolerance_of([*tree_leaves(shard.batch), *copy.parameters()])
        assumed = {logged.name: logged.assumed for logged in whole.logged.values()}
        numbers = compared(whole.parts(), [(half.rows, half.parts()) for half in halves], assumed, tolerance=tolerance)
        return Comparisons(numbers, tuple(containers))

    def _show_training(self, watch: AttributeWatch, call: Callable[[], Outcome]) -> None:
        """Has the module itself train, and not its parts, if its step then gives the same number twice.

        Terms under ``if self.training`` are compared then. A step that draws random numbers cannot be.
        """
        parts: Sequence[Any] = self._watched[replica_of_step().local_replica]
        for part in parts:
            part.training = True
        numbers = []
        for _ in range(2):
            loss = call().loss
            numbers.append(None if loss is None else float(loss.detach()))
            watch.undo()
        if numbers[0] != numbers[1]:
            for part in parts:
                part.training = False

    # Of all replicas.

    def _of_all_workers(self, local: Sequence[Outcome]) -> Sequence[Outcome]:
        workers = self._strategy.workers
        if workers.is_single:
            return local
        everyones = all_gather_object(workers, "the results of a step", [outcome.to_plain() for outcome in local])
        return [Outcome.of_plain(outcome) for worker in everyones for outcome in worker]

    def backward(self, factor: float, optimizers: Sequence[Any], *, sums: bool) -> None:
        """Adds the gradients of the last step to those that there are. Every worker must call it.

        Args:
            factor: by which the loss was multiplied.
            optimizers: whose gradients are summed over the replicas, if ``sums``.
            sums: whether an update comes next; otherwise gradients are accumulated.
        """
        self._strategy.run(self._add_gradients, (factor / self._factor, optimizers, sums))

    def _add_gradients(self, ratio: float, optimizers: Sequence[Any], sums: bool) -> None:
        replica = replica_of_step().local_replica
        gradients, self._gradients[replica] = self._gradients[replica], []
        with torch.no_grad(), DisableTorchFunction():
            for parameter, gradient in gradients:
                if ratio != 1.0:
                    gradient.mul_(ratio)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if sums:
            for optimizer in optimizers:
                optimizer.sum_gradients()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _detached(structure: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, structure)


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else math.nan
    return float(value) if isinstance(value, (int, float)) else math.nan


def _count_of(tracer: ReductionTracer, value: Tensor) -> float | None:
    """What a number is a mean over, if its division was traced."""
    pair = tracer.pair_of(value)
    return None if pair is None else float(pair[1].detach() if isinstance(pair[1], Tensor) else pair[1])
