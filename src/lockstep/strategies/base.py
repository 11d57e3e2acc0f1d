"""What all strategies have in common: run, reduce, gather, mirror, variables and datasets.

``ThreadedStrategy`` runs local replicas in threads. ``DefaultStrategy`` is the one outside every scope: one device, in
the caller's thread. ``with strategy.scope()`` sets the ambient strategy; nothing else is ambient.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from lockstep import tensorflow_names
from lockstep._torch_compat import tree_leaves, tree_map
from lockstep.checks import MOST_AT_ONCE, check_call, check_number
from lockstep.cluster.spec import Task
from lockstep.collectives.communicator import Communicator, SingleWorkerCommunicator, call_site
from lockstep.collectives.per_replica import (
    PerReplica,
    is_mirrored,
    merge,
    read_for_reduction,
    read_per_replica,
    select,
)
from lockstep.collectives.reduce import ReduceOp, gather_across, reduce_across
from lockstep.config import LogicalDevice, default_devices, release_devices, resolve_devices
from lockstep.data.batch_lists import Lists
from lockstep.data.dataset import DistributedDataset, InputContext, PerReplicaDataset, Shard
from lockstep.data.divide import Division
from lockstep.data.error_notes import ShardNotes
from lockstep.data.sharding import shard_sizes
from lockstep.data.structure import Shards
from lockstep.errors import ConfigError, UsageError
from lockstep.introspection import attribute_of
from lockstep.mirroring.gradients.local_sum import EvaluatorExchange, LocalExchange, MakeExchange
from lockstep.mirroring.metric import MirroredMetric, is_metric
from lockstep.mirroring.module.module import MemoryFormat, MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.partition import PartitionPolicy, WholeModels
from lockstep.mirroring.registry import MirroredObjects
from lockstep.mirroring.variable import Aggregation, MirroredVariable, Synchronization
from lockstep.parallel.mesh_layout import MeshLayout
from lockstep.replicas.barrier import ReplicaBarrier
from lockstep.replicas.context import ReplicaContext, get_replica_context, in_context
from lockstep.replicas.cpu.linear import may_suit, onednn_is_faster
from lockstep.replicas.device.driver import driver_of
from lockstep.replicas.device.memory import DeviceMemory
from lockstep.replicas.issue_gate import IssueGate
from lockstep.replicas.rng.function_mode import ReplicaRng
from lockstep.replicas.rng.generators import ReplicaGenerators
from lockstep.replicas.runner import ReplicaRunner
from lockstep.replicas.threads import intra_op_threads
from lockstep.replicas.watcher import Run, Watcher, ambient_watchers, torch_looks
from lockstep.tracebacks import OwnFramesHidden
from lockstep.watch.check_choice import CheckChoice
from lockstep.watch.step_guard import StepGuards

_open: ContextVar[tuple[Strategy, ...]] = ContextVar("lockstep_scopes", default=())
"""The open scopes, the innermost last: all of one strategy."""


def has_strategy() -> bool:
    """Whether this code runs inside a strategy's scope or replica."""
    return bool(_open.get())


def in_cross_replica_context() -> bool:
    """Whether this code runs once for all replicas: in a scope and outside a replica, or in a ``merge_call``."""
    return has_strategy() and get_replica_context() is None


def current_strategy() -> Strategy | None:
    """The strategy whose scope or replica this is; None outside."""
    scopes = _open.get()
    return scopes[-1] if scopes else None


class Scope(ContextDecorator):
    """The context manager of ``strategy.scope()``. It may be entered many times, and inside itself."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __enter__(self) -> Strategy:
        """Raises a UsageError if another strategy's scope is open, or if this is inside a replica."""
        if get_replica_context() is not None:
            raise UsageError(
                "a scope is for all replicas together and was entered inside one; enter it outside strategy.run"
            )
        outer = current_strategy()
        if outer is not None and outer is not self._strategy:
            raise UsageError(f"{self._strategy!r} cannot be used inside the scope of {outer!r}; leave that scope first")
        _open.set((*_open.get(), self._strategy))
        return self._strategy

    def __exit__(self, *_: object) -> None:
        _open.set(_open.get()[:-1])

    def __repr__(self) -> str:
        return f"<scope of {self._strategy!r}>"


R = TypeVar("R")


class Strategy(ABC):
    """Runs one program on many replicas. Abstract: see ``MirroredStrategy`` and the others."""

    devices: tuple[LogicalDevice, ...]
    """The logical devices of the local replicas, in replica order."""
    workers: Communicator
    """The workers that run this strategy's replicas."""
    layout: MeshLayout | None = None
    """How workers divide the model; None if each replica has a whole one."""
    watchers: list[Watcher]
    """What is asked at the beginning of each run who looks at it; front ends and tools add theirs."""
    check_choice: CheckChoice
    """Chooses what looks at the runs of a step. Step functions of this package are looked at when they ask for it."""

    def __init__(self, make_exchange: MakeExchange = LocalExchange, partition: PartitionPolicy | None = None) -> None:
        self._mirrored = MirroredObjects(make_exchange, partition or WholeModels())
        self.watchers = []

    @property
    @abstractmethod
    def generators(self) -> ReplicaGenerators:
        """The random generators of the local replicas, whose states checkpoints save."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of the replicas' random numbers."""

    @property
    @abstractmethod
    def threads_per_replica(self) -> tuple[int, ...]:
        """The number of intra-op threads of each local replica on a CPU."""

    @property
    @abstractmethod
    def thread_ids(self) -> tuple[int | None, ...]:
        """The number that the system gave each local replica's thread; empty if a replica has none of its own."""

    def computing_alike(self) -> AbstractContextManager[None]:
        """A block outside replicas in which torch rounds alike on every layout of ``replicas=``.

        It uses as many threads as a replica does.
        """
        alike = self.workers.any_layout and get_replica_context() is None
        return intra_op_threads(self.threads_per_replica[0]) if alike else nullcontext()

    @abstractmethod
    def _execute(self, run: Run, bodies: Sequence[Callable[[], Any]], *, is_plain: bool = False) -> list[Any]:
        """Calls one body in each replica's context and returns their results. ``is_plain`` is as ``_is_plain``."""

    @property
    @abstractmethod
    def function_modes(self) -> Sequence[ReplicaRng]:
        """The mode of each local replica, through which its calls of torch functions go."""

    @abstractmethod
    def device_memory(self) -> tuple[DeviceMemory, ...]:
        """The memory in use and the peak of each local replica's GPU, or share of one, in bytes; none for a CPU.

        It reads all blocks of torch's allocator, which takes a millisecond or more. Call it outside replicas.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the replicas' threads and, among several workers, leaves the job. Idempotent; then ``run`` raises.

        The threads also end when the strategy is garbage collected and at interpreter exit. When no strategy uses a
        device any more, it may be divided again.
        """

    if not TYPE_CHECKING:  # which takes a class that has this for one that has every name

        def __getattr__(self, name: str) -> object:
            if name in tensorflow_names.STRATEGY:
                raise tensorflow_names.missing(repr(type(self).__name__), name, tensorflow_names.STRATEGY)
            return object.__getattribute__(self, name)  # raises again what a property has raised, if it is one

    @property
    def task(self) -> Task:
        """The role of this process: "worker", or "evaluator" for one beside the training, which trains nothing."""
        return self.workers.task

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers, which divide each global batch."""
        return self.workers.num_replicas

    @property
    def mirrored_modules(self) -> tuple[MirroredModule, ...]:
        """The modules that this strategy has mirrored and that are in use, in the order of mirroring."""
        return self._mirrored.modules

    def mirrored_parameters(self) -> set[int]:
        """The ids of all parameters of all copies of the mirrored modules."""
        return self._mirrored.parameters()

    def scope(self) -> AbstractContextManager[Strategy]:
        """Makes this the strategy that ``ls.Model`` and ``ls.get_strategy`` find inside the ``with`` block.

        The object may be kept, entered many times, and entered inside itself. Entering it raises a UsageError if
        another strategy's scope is open, or inside a replica.
        """
        self._outside("scope")
        return Scope(self)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs ``fn`` once per replica and waits for all.

        The caller's grad mode, autocast and context variables hold in the replicas too.

        Args:
            fn: the step function; ``ls.get_replica_context()`` inside it is this replica's.
            args: a tuple or list. Of a PerReplica, also inside tuples, lists and dicts, each replica gets its own item;
                other values go to every replica unchanged.
            kwargs: keyword arguments, treated in the same way.

        Returns:
            The structure that ``fn`` returned, with a PerReplica for each leaf. A leaf that is the same object in all
            replicas is returned as it is, and so is a number, string or None that is equal in all.

        Raises:
            TypeError: ``fn`` is no function, ``args`` not a tuple or list, or ``kwargs`` not a dict by names.
            BaseException: the exception of a replica that failed; if there are others, with a note that names it.
            CollectiveError: the replicas did not meet at the same collective.
            UsageError: called inside a replica, or inside another strategy's scope.
        """
        modules = self._check_run(fn, args, kwargs)
        run = self._view_run(fn, args, kwargs)
        watchers = self._watch(run)
        with OwnFramesHidden(), Scope(self):
            if self._is_plain(run, modules) and not watchers:
                results = self._execute(run, self._bodies(run, watchers), is_plain=True)
            else:
                with self._moments(run, watchers), self._mirrored.run_end(len(self.devices)):
                    results = self._execute(run, self._bodies(run, watchers))
        return self._merge(results)

    def _check_run(self, fn: Any, args: Any, kwargs: Any) -> Sequence[MirroredModule]:
        """Refuses a call that is no run; copies the user's changes to all replicas, or refuses them."""
        self._outside("run")
        check_call(fn, args, kwargs, "strategy.run(step, (batch,))")
        return self._mirrored.align()

    def _is_plain(self, run: Run, modules: Sequence[MirroredModule]) -> bool:
        """Whether the run is that of a plain program: one replica, and torch calls that mean what they do outside it.

        Such a run is executed in the caller's thread where that can be, and leaves nothing to do for its end.
        """
        return False

    def _view_run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Run:
        """Divides the arguments among the local replicas."""
        arguments, shards = (tuple(args), dict(kwargs or {})), Shards(len(self.devices))
        views = shards.views(arguments)  # refuses another strategy's values
        return Run(
            strategy=self,
            fn=fn,
            arguments=arguments,
            views=views,
            shards=shards.leaves,
            rows=shards.rows(),
            distributed=shards.are_distributed,
        )

    def _watch(self, run: Run) -> Sequence[Watcher]:
        """Asks who looks at the run; in most runs nobody does."""
        watchers: list[Watcher] = []
        for watcher in (*ambient_watchers.get(), *self.watchers):
            watchers += watcher.looks_at(run)
        return watchers

    @contextmanager
    def _moments(self, run: Run, watchers: Sequence[Watcher]) -> Iterator[None]:
        """A block around the run: the moments of its watchers, of whom the last to begin is the first to end."""
        with ExitStack() as ends:
            for watcher in watchers:
                watcher.run_begins(run)
                ends.push(partial(_end_moments, watcher, run))
            yield

    def _bodies(self, run: Run, watchers: Sequence[Watcher]) -> list[Callable[[], Any]]:
        """What each replica calls: the user's function, within the moments of the watchers if there are any."""
        bodies: list[Callable[[], Any]] = []
        for replica, (args, kwargs) in enumerate(run.views):
            body = partial(run.fn, *args, **kwargs)
            bodies.append(partial(self._call_watched, watchers, replica, body) if watchers else body)
        return bodies

    def _call_watched(self, watchers: Sequence[Watcher], replica: int, body: Callable[[], Any]) -> Any:
        """Calls the body of a replica within the moments of the watchers, in the replica's thread."""
        context, modes = get_replica_context(), self.function_modes
        with ExitStack() as blocks:
            for watcher in watchers:
                blocks.enter_context(watcher.in_replica(replica))
            if context is not None:
                context.watchers = watchers
            if modes and (looks := torch_looks(watchers, replica)):
                blocks.enter_context(modes[replica].looked_at_by(looks))
            return body()

    def _merge(self, results: Sequence[Any]) -> Any:
        """Joins the results; sums the gradients that the run has left: a program outside sees those of one device."""
        merged = merge(results)
        self._mirrored.sum_after_run(self)
        return merged

    def _note(self, run: Run, name: str, replica: int, error: BaseException) -> str:
        """The note on an error of the replica of that name and local number."""
        notes = ShardNotes(
            shards=run.shards,
            replicas=self.num_replicas_in_sync,
            distributed=run.distributed,
            worker=None if self.workers.is_single else self.workers.processes.index,
        )
        return notes.note(name, replica, error)

    @contextmanager
    def watched_by(self, watcher: Watcher) -> Iterator[None]:
        """A block in which ``watcher`` is asked at each run, after those that are asked at all runs."""
        self.watchers.append(watcher)
        try:
            yield
        finally:
            self.watchers.remove(watcher)

    @property
    def is_watched(self) -> bool:
        """Whether a watcher has to see every step, and no step may be replayed without calling it."""
        return any(watcher.sees_every_step for watcher in (*ambient_watchers.get(), *self.watchers))

    def changes_spread(self) -> AbstractContextManager[None]:
        """A block during a run in which a change to a user's module is made to all copies."""
        return self._mirrored.changes_spread()

    def reduce(self, op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Reduces per-replica values to one: a tensor on replica 0's device, or a number, for each leaf.

        Args:
            op: "sum" or "mean", or an ``ls.ReduceOp``.
            value: a PerReplica or a variable, or a structure of them; a plain value counts once a replica in a sum.
            axis: also reduce along this dimension of each value; the mean is then total sum over total count.
        """
        self._outside("reduce")
        op, mirrored = ReduceOp.of(op), all(is_mirrored(leaf) for leaf in tree_leaves(value))
        value = read_for_reduction(value)
        bare = not any(isinstance(leaf, PerReplica) for leaf in tree_leaves(value))
        # A bare value is that of all local replicas, and each worker may have another.
        same = mirrored or (bare and self.workers.is_single and not self.workers.any_layout)
        if op is ReduceOp.MEAN and axis is None and same:
            # Equal in every replica: adding and dividing would only round it.
            return value
        with self.computing_alike():
            return self._map_values(partial(reduce_across, self.workers, op, axis=axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates per-replica values along ``axis``, in replica order. Shapes may differ in that dimension."""
        self._outside("gather")
        gather = partial(gather_across, self.workers, f"gather(axis={axis})", axis=axis)
        return self._map_values(gather, read_per_replica(value))

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """One value for each local replica; a plain value is repeated. The values of a variable are copies."""
        value = read_per_replica(value)
        return tuple(self._view(value, replica) for replica in range(len(self.devices)))

    @overload
    def mirror(
        self, target: nn.Module, *, sync_batchnorm: bool = False, memory_format: MemoryFormat = "auto"
    ) -> MirroredModule: ...

    @overload
    def mirror(self, target: torch.optim.Optimizer) -> MirroredOptimizer: ...

    def mirror(
        self,
        target: nn.Module | torch.optim.Optimizer,
        *,
        sync_batchnorm: bool = False,
        memory_format: MemoryFormat = "auto",
    ) -> MirroredModule | MirroredMetric | MirroredOptimizer:
        """Gives every replica its copy of a module, or makes an optimizer's step a step of all replicas.

        Args:
            target: a module, which becomes replica 0's copy and is moved to its device in place; an optimizer over
                parameters of mirrored modules; or a torchmetrics metric, whose states are merged (``MirroredMetric``).
            sync_batchnorm: batch norms take their statistics from the whole global batch, as torch.nn.SyncBatchNorm
                always does.
            memory_format: the memory format of the weights; "auto" is channels_last if there are 2-d convolutions.

        Raises:
            UsageError: a module that cannot be copied, or an optimizer of modules that are not mirrored.
            TypeError: ``target`` is neither a module nor an optimizer.
        """
        self._outside("mirror")
        if isinstance(target, (MirroredMetric, MirroredOptimizer)):
            return target
        if is_metric(target):
            return self._mirrored.mirror_metric(self, target)  # type: ignore[arg-type]
        if isinstance(target, nn.Module):
            return self._mirrored.mirror_module(
                self, target, sync_batchnorm=sync_batchnorm, memory_format=memory_format
            )
        if isinstance(target, torch.optim.Optimizer):
            return self._mirrored.mirror_optimizer(self, target)
        raise TypeError(f"mirror takes a torch.nn.Module or a torch.optim.Optimizer, got {type(target).__name__}")

    def variable(
        self, value: Any, *, aggregation: Aggregation = "none", synchronization: Synchronization = "on_write"
    ) -> MirroredVariable:
        """Makes a variable with one value for each replica; see ``MirroredVariable``."""
        self._outside("variable")
        variable = MirroredVariable(self, value, aggregation=aggregation, synchronization=synchronization)
        self._mirrored.add_variable(variable)
        return variable

    def distribute_dataset(
        self,
        dataset: Iterable[Any],
        *,
        shard: Shard = "batch",
        prefetch: int | None = None,
        lists: Lists = "auto",
        divide: Division | None = None,
    ) -> DistributedDataset:
        """Divides each global batch of ``dataset`` among the replicas; see ``DistributedDataset``.

        Every worker must call it and iterate over the result in the same way.

        Args:
            dataset: any iterable of global batches.
            shard: what each worker reads: its part of every batch ("batch"), some of the shards of a
                datasets.IterableDataset ("file"), or a dataset of its own ("off").
            prefetch: the number of batches to read ahead; 0 reads a batch when it is asked for. None is 2 for a
                DataLoader with worker processes and, with replicas on GPUs, for data in memory; it is 0 for what may
                draw random numbers or depend on the training's state, such as generators and datasets of your own.
            lists: what a list or tuple in a batch is: one item for each row ("rows"), a structure ("columns"), or
                either, by its length ("auto"); "auto" refuses a list that could be both.
            divide: how a batch is divided by example whose tensors have other than one row an example: flat targets
                with an index, packed tokens, pairs. The functions of ``ls.divide`` make it.
        """
        self._outside("distribute_dataset")
        return DistributedDataset(
            dataset, self.devices, workers=self.workers, shard=shard, prefetch=prefetch, lists=lists, divide=divide
        )

    def distribute_datasets_from_function(
        self, fn: Callable[[InputContext], Iterable[Any]], *, prefetch: int | None = None, lists: Lists = "auto"
    ) -> PerReplicaDataset:
        """Uses this worker's per-replica batches, which ``fn(InputContext)`` returns, without dividing them.

        See ``PerReplicaDataset``; ``prefetch``, of each replica's batches, and ``lists`` as in ``distribute_dataset``.
        """
        self._outside("distribute_datasets_from_function")
        return PerReplicaDataset(fn, self.devices, workers=self.workers, prefetch=prefetch, lists=lists)

    def _map_values(self, reduction: Callable[[list[Any]], R], value: Any) -> Any:
        if isinstance(value, PerReplica) and not all(isinstance(item, (torch.Tensor, int, float)) for item in value):
            # Values such as lists are values here and not structures: each is that of one replica.
            return reduction(list(self.local_results(value)))
        return tree_map(lambda leaf: reduction(list(self.local_results(leaf))), value)

    def _view(self, structure: Any, replica: int) -> Any:
        return select(structure, replica, len(self.devices))

    def _outside(self, method: str) -> None:
        if get_replica_context() is not None:
            raise UsageError(
                f"{method} is for all replicas together and was called inside one; call it outside strategy.run, "
                "or use the replica context: ls.get_replica_context().all_reduce, .all_gather, .merge_call"
            )


class ThreadedStrategy(Strategy):
    """A strategy with one replica for each logical device, each in its own thread. Abstract.

    ``make_exchange`` makes the exchange of an optimizer's gradients, ``partition`` says which part of a model this
    worker holds, and ``replica_block`` is a context around each replica's part of a run.
    """

    def __init__(
        self,
        devices: tuple[LogicalDevice, ...],
        workers: Communicator,
        runner: ReplicaRunner,
        make_exchange: MakeExchange = LocalExchange,
        *,
        partition: PartitionPolicy | None = None,
        replica_block: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        # An evaluator's optimizers are made as elsewhere, and make no update.
        super().__init__(EvaluatorExchange if workers.task == "evaluator" else make_exchange, partition)
        self.devices, self.workers, self._runner, self._replica_block = devices, workers, runner, replica_block
        self.check_choice = CheckChoice(self._mirrored, runner.function_modes)
        self.watchers.append(StepGuards(self._mirrored, runner.function_modes, workers.num_replicas))
        if workers.num_replicas > 1:
            self.watchers.append(self.check_choice)
        # Called at most once: by ``close``, or when a strategy that nobody closed is collected. Its devices could
        # otherwise never be divided again.
        self._release_devices = weakref.finalize(self, release_devices, devices)

    @property
    def generators(self) -> ReplicaGenerators:
        return self._runner.generators

    @property
    def seed(self) -> int:
        return self._runner.seed

    @property
    def threads_per_replica(self) -> tuple[int, ...]:
        return self._runner.threads

    @property
    def thread_ids(self) -> tuple[int | None, ...]:
        return self._runner.thread_ids

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        self._outside("device_memory")
        return self._runner.device_memory()

    def close(self) -> None:
        self._runner.close()
        self._release_devices()
        self.workers.close()

    @property
    def function_modes(self) -> Sequence[ReplicaRng]:
        return self._runner.function_modes

    def _execute(self, run: Run, bodies: Sequence[Callable[[], Any]], *, is_plain: bool = False) -> list[Any]:
        if not self.workers.is_single:
            name = attribute_of(run.fn, "__qualname__", type(run.fn).__qualname__)
            # Others name it if this worker is lost in the run; with the line, for a program has many runs.
            self.workers.set_status(f"a run of {name} ({call_site()})")
        if self._replica_block is not nullcontext:
            bodies = [partial(_run_within, self._replica_block, body) for body in bodies]
        return self._runner.run(self, run.fn, bodies, run.rows, partial(self._note, run), is_plain=is_plain)

    def _is_plain(self, run: Run, modules: Sequence[MirroredModule]) -> bool:
        # The mode of a part draws dropout of what its worker holds alone, and keeps torch from fused inference, which
        # takes no divided weights.
        if self.workers.num_replicas > 1 or self._mirrored.are_parts:
            return False
        for module in modules:
            # The mode mends an instance norm of torch's, in a format that mirroring has given the weights.
            if not module.copy_follower.is_alone or module.is_channels_last or module.is_compiled:
                return False
        if not onednn_is_faster():
            return True
        # Set for runs with the mode too: whether one has it may depend on other threads, and its numbers must not.
        may_suit_onednn = may_suit(run.shards[0], self._mirrored.largest_weight)
        self._runner.function_modes[0].use_replacements(use=may_suit_onednn)
        return not may_suit_onednn


def _end_moments(watcher: Watcher, run: Run, _: object, error: BaseException | None, __: object) -> None:
    watcher.run_ended(run, error)


def _run_within(block: Callable[[], AbstractContextManager[None]], body: Callable[[], Any]) -> Any:
    with block():
        return body()


def select_devices(
    selection: Sequence[str | torch.device | LogicalDevice] | None, replicas: int | None = None
) -> tuple[LogicalDevice, ...]:
    """The device of each replica: ``selection``, or all devices for None. Watchers may replace them."""
    if isinstance(selection, str | bytes):
        raise ConfigError(f"devices is a list, got the string {selection!r}; write devices=[{selection!r}]")
    devices = resolve_devices(selection)
    if replicas is not None:
        devices = place_replicas(replicas, devices)
    for watcher in ambient_watchers.get():
        devices = watcher.devices_chosen(devices)
    return devices


def place_replicas(replicas: int, devices: Sequence[LogicalDevice]) -> tuple[LogicalDevice, ...]:
    """The device of each of ``replicas`` replicas, laid on ``devices`` in blocks whose sizes differ by at most one.

    Raises ConfigError for devices of two kinds.
    """
    if len({device.kind for device in devices}) > 1:
        raise ConfigError(
            f"replicas={replicas} promises the same bits on every layout, but {devices[0].name} and {devices[-1].name} "
            "are among the devices, and a CPU and a GPU round differently; choose devices of one kind"
        )
    sizes = shard_sizes(replicas, len(devices))
    return tuple(device for device, size in zip(devices, sizes, strict=True) for _ in range(size))


def check_replicas(replicas: int | None, threads: int | None) -> int | None:
    """Checks both numbers; raises a ConfigError. Returns the intra-op threads of a replica; None divides the cores."""
    for name, number in (("replicas", replicas), ("threads_per_replica", threads)):
        check_number(name, number, least=1, most=MOST_AT_ONCE, whole=True)
    return 1 if threads is None and replicas is not None else threads


def describe_devices(strategy: Strategy) -> str:
    """The devices in a strategy's ``repr``, and the number of local replicas if it is another one."""
    names = list(dict.fromkeys(device.name for device in strategy.devices))
    replicas = "" if len(names) == len(strategy.devices) else f", {len(strategy.devices)} replicas"
    return f"[{', '.join(names)}]{replicas}"


class DefaultStrategy(Strategy):
    """One replica on the first logical GPU, else the first logical CPU device. No thread: a plain torch program."""

    def __init__(self) -> None:
        super().__init__()
        self.check_choice = CheckChoice(self._mirrored, ())

    @cached_property
    def devices(self) -> tuple[LogicalDevice, ...]:  # type: ignore[override]
        """The one device; chosen, and taken into use, when it is first asked for."""
        return resolve_devices([default_devices()[0]])

    workers: Communicator = SingleWorkerCommunicator(1)

    @cached_property
    def generators(self) -> ReplicaGenerators:
        return ReplicaGenerators([], [])  # torch's own

    @property
    def seed(self) -> int:
        return torch.initial_seed()

    @property
    def threads_per_replica(self) -> tuple[int, ...]:
        return (torch.get_num_threads(),)

    @property
    def thread_ids(self) -> tuple[int | None, ...]:
        return ()

    def device_memory(self) -> tuple[DeviceMemory, ...]:
        device = self.devices[0]
        driver = driver_of(device)
        if driver is None:
            return ()
        has = driver.whole(device.torch_device)
        return (
            DeviceMemory(name=device.name, limit=None, in_use=has.in_use, reserved=has.reserved, peak=has.reserved),
        )

    def close(self) -> None:
        """Releases the device, which may then be divided again. The next use takes a device anew."""
        # A cached property stands in the object's dict once it has been asked for.
        if "devices" in vars(self):
            release_devices(self.devices)
            del self.devices

    @property
    def function_modes(self) -> Sequence[ReplicaRng]:
        return ()

    def _execute(self, run: Run, bodies: Sequence[Callable[[], Any]], *, is_plain: bool = False) -> list[Any]:
        device = self.devices[0]
        # Collectives of one replica return at once; the barrier is there so that a step's code need not differ.
        barrier = ReplicaBarrier([f"replica 0 ({device.name})"], timeout_s=1.0)
        with in_context(ReplicaContext(self, 0, device, barrier, IssueGate(1))):
            return [bodies[0]()]

    def __repr__(self) -> str:
        return "the default strategy of one device"


@cache
def _default() -> DefaultStrategy:
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """The strategy whose scope or replica this code is in; outside, the default one of one device."""
    return current_strategy() or _default()
