"""The mirrored objects of one strategy, and what happens to all of them before and after a run.

before   align: copies the user's changes to all replicas
after    run_end: keeps each replica's attributes            sum_after_run: sums the gradients that are left
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import nn

from lockstep.collectives.communicator import check_agreement
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.gradients.local_sum import Copies, MakeExchange, Settings, has_gradients
from lockstep.mirroring.gradients.parameter_hooks import hooked, refuse_hook
from lockstep.mirroring.metric import ONE_OBJECT, MirroredMetric, is_metric, mirror_metric
from lockstep.mirroring.module.copies import storage_groups
from lockstep.mirroring.module.copy_follower import CopyFollower
from lockstep.mirroring.module.module import MemoryFormat, MirroredModule, mirror_module
from lockstep.mirroring.optim.gradient_sums import GradientSums
from lockstep.mirroring.optim.misuse import guard_groups, plain_settings, watch_plain_steps
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.partition import PartitionPolicy
from lockstep.mirroring.variable import MirroredVariable
from lockstep.replicas.context import ReplicaContext
from lockstep.replicas.cpu.memory import available_mb
from lockstep.replicas.owner import Owner

T = TypeVar("T")


class MirroredObjects:
    """What one strategy has mirrored, held weakly: a mirrored module keeps its strategy alive, and not vice versa.

    Attributes:
        num_mirrored: how many modules have been mirrored so far.
    """

    def __init__(self, make_exchange: MakeExchange, partition: PartitionPolicy) -> None:
        self._make_exchange = make_exchange
        self._partition = partition
        self._modules: WeakValueDictionary[int, MirroredModule] = WeakValueDictionary()
        self.num_mirrored = 0
        self._metrics: WeakValueDictionary[int, MirroredMetric] = WeakValueDictionary()
        self._without_sums_cache: list[tuple[nn.Parameter, ...]] = []
        self._has_warned = False
        self._cached_at = (-1, -1, -1)  # the revision, and the number of optimizers, that the cache is of
        self._largest_weight = ((-1, -1), 0)  # with the revision that it is of
        self._stepped_twice: set[int] = set()
        self._changes = 0
        # By module: with an optimizer the program keeps the sums alive, without one its module does.
        self._sums_by_hand: WeakKeyDictionary[MirroredModule, GradientSums] = WeakKeyDictionary()
        self._optimizers: WeakValueDictionary[int, MirroredOptimizer] = WeakValueDictionary()
        self._variables: WeakValueDictionary[int, MirroredVariable] = WeakValueDictionary()  # == is elementwise

    @property
    def modules(self) -> tuple[MirroredModule, ...]:
        """The modules in use, in the order of mirroring."""
        return _alive(self._modules)

    @property
    def optimizers(self) -> tuple[MirroredOptimizer, ...]:
        """The mirrored optimizers in use, in the order of mirroring."""
        return _alive(self._optimizers)

    @property
    def largest_weight(self) -> int:
        """The number of elements of the largest matrix among the weights."""
        if self._largest_weight[0] != self.revision:
            sizes = (copies[0].numel() for copies in self._parameters() if copies[0].ndim == 2)
            self._largest_weight = self.revision, max(sizes, default=0)
        return self._largest_weight[1]

    @property
    def are_parts(self) -> bool:
        """Whether there are modules of which other workers hold other parts."""
        return self._partition.parts and len(self._modules) > 0

    @property
    def revision(self) -> tuple[int, int]:
        """Another value whenever a module, a weight or a sum of gradients has come, changed or gone."""
        return self._changes, len(self._modules)

    def mirror_metric(self, strategy: Owner, metric: nn.Module) -> MirroredMetric:
        """Returns the mirrored metric of a torchmetrics metric; makes it if there is none."""
        mirrored = self._metrics.get(id(metric)) or mirror_metric(strategy, metric)
        return self._metrics.setdefault(id(metric), mirrored)

    def mirror_module(
        self, strategy: Owner, module: nn.Module, *, sync_batchnorm: bool, memory_format: MemoryFormat
    ) -> MirroredModule:
        """Returns the mirrored module of ``module``; makes it if there is none."""
        if isinstance(module, MirroredModule):
            if self._modules.get(id(module.module)) is not module:
                raise UsageError("this module is mirrored by another strategy; mirror the plain module with this one")
            return module
        self._mirror_metrics_in(module, strategy)
        module = self._partition.take(module)
        mirrored = self._modules.get(id(module))
        if mirrored is None:
            watch_plain_steps()
            self.follow()
            mirrored = mirror_module(strategy, module, self._partition, self._followers, sync_batchnorm, memory_format)
            mirrored.gradient_sums = self.gradient_sums
            self.num_mirrored += 1
            self._modules[id(mirrored.module)] = mirrored
            self._changes += 1
        elif memory_format != "auto" or (sync_batchnorm and not mirrored.has_sync_batchnorm):
            raise UsageError(
                "this module is mirrored already, and keeps the settings that it was mirrored with; "
                "give sync_batchnorm and memory_format when you mirror it first"
            )
        return mirrored

    def _mirror_metrics_in(self, module: nn.Module, strategy: Owner) -> None:
        for name, child in module._modules.items():
            if is_metric(child):
                if ONE_OBJECT not in vars(child):
                    module._modules[name] = self.mirror_metric(strategy, child)  # type: ignore[arg-type]
            elif child is not None:
                self._mirror_metrics_in(child, strategy)

    def mirror_optimizer(self, strategy: Owner, optimizer: torch.optim.Optimizer) -> MirroredOptimizer:
        self._partition.check(optimizer)
        check_agreement(strategy.workers, "the optimizer", plain_settings(optimizer))
        make_sums = partial(self._make_sums, strategy)
        mirrored = MirroredOptimizer(strategy, optimizer, self._copies_by_parameter, make_sums, self._partition)
        _check_memory(strategy.devices, mirrored.parameters)
        self._optimizers[id(mirrored)] = mirrored
        return mirrored

    def sum_after_run(self, strategy: Owner) -> None:
        """After a run: sums the gradients that it leaves, so that a program outside sees those of one device.

        With several workers they stay each worker's own. Optimizers with parameters in common sum them in their steps.
        """
        # Between workers a sum is a collective, and a run that leaves gradients on one worker only would wait.
        if not strategy.workers.is_single:
            for sums in self.gradient_sums():
                sums.state.note_left()
            self._warn_of_local_gradients()
            return
        if len(strategy.devices) == 1:
            return
        for copies in self._without_sums():
            if has_gradients([copies], slice(1, None)):
                self.sum_by_hand(strategy, copies[0])
        for sums in self.gradient_sums():
            if not (self._stepped_twice and any(id(copies[0]) in self._stepped_twice for copies in sums.parameters)):
                sums.sum_after_run()

    def _without_sums(self) -> list[tuple[nn.Parameter, ...]]:
        """The copies of each parameter whose gradients nothing sums."""
        # The program may have dropped an optimizer, whose parameters are then summed by hand.
        now = (self._changes, len(self._modules), len(self._optimizers))
        if self._cached_at != now:
            self._cached_at = now
            times = Counter(id(copies[0]) for sums in self.gradient_sums() for copies in sums.parameters)
            self._without_sums_cache = [copies for copies in self._parameters() if id(copies[0]) not in times]
            self._stepped_twice = {number for number, count in times.items() if count > 1}
        return self._without_sums_cache

    def _warn_of_local_gradients(self) -> None:
        """Warns once, with several workers, of a run that leaves gradients of parameters without an optimizer."""
        if self._has_warned or not has_gradients(self._without_sums(), slice(1)):
            return
        self._has_warned = True
        warnings.warn(
            "the run leaves gradients of parameters that no mirrored optimizer holds, which are this worker's own; "
            "read .grad in the step, or mirror an optimizer over them and call its sum_gradients() on every worker; "
            "freeze parameters that are not trained with requires_grad_(False)",
            stacklevel=4,
        )

    def gradient_sums(self) -> list[GradientSums]:
        """The sums of the optimizers' gradients, and of those that a program reads without an optimizer."""
        sums = [optimizer.gradient_sums for optimizer in self.optimizers]
        return [*sums, *self._sums_by_hand.values()] if len(self._sums_by_hand) else sums

    def sum_by_hand(self, strategy: Owner, parameter: nn.Parameter) -> None:
        """Has the gradients of a parameter that no optimizer holds summed from now on, with those of its module.

        Every worker must call it, between runs or while its replicas wait.
        """
        module = next(
            module
            for module in self.modules
            if any(copy is parameter for duplicate in module.copies for copy in duplicate.parameters())
        )
        former = self._sums_by_hand.get(module)
        other_sums = [sums for sums in self.gradient_sums() if sums is not former]
        ids = {id(copies[0]) for sums in other_sums for copies in sums.parameters}
        parameters = [copies for copies in _copies_of(module) if id(copies[0]) not in ids]
        lines = (f"{len(parameters)} parameters",)
        check_agreement(strategy.workers, "the gradients without an optimizer", lines)
        self._sums_by_hand[module] = self._make_sums(strategy, parameters, lambda: lines)

    def _make_sums(self, strategy: Owner, parameters: Sequence[Copies], settings: Settings) -> GradientSums:
        """Makes the sums of some parameters' gradients, in place of those by hand."""
        groups = storage_groups(strategy.devices)
        sums = GradientSums(strategy, parameters, groups, self._make_exchange(parameters, groups), settings)
        ids = {id(copies[0]) for copies in parameters}
        for module, former in tuple(self._sums_by_hand.items()):
            if any(id(copies[0]) in ids for copies in former.parameters):
                sums.state.continue_from(former.state)
                del self._sums_by_hand[module]
        self._changes += 1
        return sums

    def add_variable(self, variable: MirroredVariable) -> None:
        self._variables[id(variable)] = variable

    def parameters(self) -> set[int]:
        """The ids of all parameters of all copies of the modules."""
        return {id(copy) for copies in self._parameters() for copy in copies}

    def _parameters(self) -> Iterator[tuple[nn.Parameter, ...]]:
        for module in self.modules:
            yield from _copies_of(module)

    def align(self) -> tuple[MirroredModule, ...]:
        """Copies the user's changes since the last run to all replicas, or refuses them. Returns the modules."""
        for variable in _alive(self._variables) if len(self._variables) else ():
            variable.check_unchanged()
        modules = self.modules
        for module in modules:
            if module.align():
                self._changes += 1
            if module.has_others:
                self._take_hooks(module)
        for sums in self._sums_by_hand.values() if len(self._sums_by_hand) else ():
            sums.state.check_left()
        for optimizer in self.optimizers:
            optimizer.gradient_sums.state.check_left()
            guard_groups(optimizer.plain)  # loading a state_dict makes them anew
        return modules

    def _take_hooks(self, module: MirroredModule) -> None:
        """Has updates call the hooks on parameters that several replicas train, or refuses them in a user's loop."""
        weights = module.copy_follower.weights
        for holder, hook in hooked(self._partition.holders(module.module) if module.is_part else weights):
            weight = next((copy for copy in weights if holder is self._partition.source_of(copy)), holder)
            if not any(optimizer.hooks.at_updates and optimizer.hooks.take(weight) for optimizer in self.optimizers):
                refuse_hook(holder, hook, is_part=module.is_part)

    @contextmanager
    def changes_spread(self) -> Iterator[None]:
        """Around a function that runs once for all replicas during a run: what it sets reaches all copies."""
        with ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(module.copy_follower.paused())
            yield

    def follow(self) -> None:
        """Between runs: brings new submodules, weights and buffers to all copies."""
        for module in self.modules:
            if module.copy_follower.bring_changes():
                self._changes += 1

    @contextmanager
    def run_end(self, replicas: int) -> Iterator[None]:
        """Ends a run: keeps each replica's attributes; after a failure, removes the gradients that the run added.

        After a failure with several replicas only: the gradients of one replica are those of one device.
        """
        before = {sums.state: sums.state.versions() for sums in self.gradient_sums()} if replicas > 1 else {}
        failed = True
        try:
            yield
            failed = False
        finally:
            with ExitStack() as stack:
                for module in self.modules:
                    stack.callback(module.copy_follower.after_run, failed=failed)
                for sums in self.gradient_sums() if failed and replicas > 1 else ():
                    stack.callback(sums.state.run_failed, before.get(sums.state))

    def _followers(self) -> list[CopyFollower]:
        return [module.copy_follower for module in self.modules]

    def _copies_by_parameter(self) -> dict[int, tuple[nn.Parameter, ...]]:
        self.follow()
        return {id(copies[0]): copies for copies in self._parameters()}


def _alive(objects: WeakValueDictionary[int, T]) -> tuple[T, ...]:
    """The values of a dict, which may lose some at any time. Iterating over it instead takes three times as long."""
    return tuple([value for reference in objects.valuerefs() if (value := reference()) is not None])


def _copies_of(module: MirroredModule) -> Iterator[tuple[nn.Parameter, ...]]:
    """For each parameter of a module its copies."""
    yield from zip(*(duplicate.parameters() for duplicate in module.copies), strict=True)


class StepGradients:
    """Called when a step reads or assigns the ".grad" of its weights, before the optimizer's step."""

    def __init__(self, objects: MirroredObjects) -> None:
        self._objects = ref(objects)
        self._sums: dict[int, ref[GradientSums]] = {}

    def read(self, context: ReplicaContext, parameter: nn.Parameter) -> None:
        """Gives the replica the sums of the parameter's gradients, and of all that are summed with them."""
        objects = self._objects()
        if objects is not None and self._of(parameter) is None:
            make = partial(objects.sum_by_hand, context.strategy)
            context.meet("sums of gradients without an optimizer", parameter, lambda parameters: make(parameters[0]))
        sums = self._of(parameter)
        if sums is not None:
            sums.give(context)

    def assigned(self, context: ReplicaContext, parameter: nn.Parameter, value: Any) -> None:
        """A replica is about to assign the ".grad" of one of its weights."""
        sums = self._of(parameter)
        if sums is not None:
            sums.state.assigned(context, parameter, value)

    def _of(self, parameter: nn.Parameter) -> GradientSums | None:
        reference, objects = self._sums.get(id(parameter)), self._objects()
        sums = None if reference is None else reference()
        if sums is not None or objects is None:
            return sums
        for candidate in objects.gradient_sums():
            ids = {id(copy) for copies in candidate.parameters for copy in copies}
            if id(parameter) in ids:
                self._sums |= dict.fromkeys(ids, ref(candidate))
                return candidate
        return None


def _check_memory(devices: Sequence[LogicalDevice], parameters: Sequence[Sequence[nn.Parameter]]) -> None:
    """Raises a ConfigError where the gradients of the replicas on a CPU need more memory than there is.

    The system would end the process with SIGKILL, and say nothing.
    """
    replicas = sum(device.kind == "CPU" for device in devices)
    replica_mb = sum(copies[0].nbytes for copies in parameters if copies[0].requires_grad) / 2**20
    if replicas > 1 and replicas * replica_mb > (free_mb := available_mb()):
        raise ConfigError(
            f"{replicas} replicas of this process hold gradients of {replica_mb:.0f} MB each, "
            f"{replicas * replica_mb:.0f} MB in all, and {free_mb:.0f} MB of memory are free; give fewer replicas, or "
            "more hosts"
        )
