"""The mirrored module, and how ``strategy.mirror(module)`` makes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep._torch_compat import (
    BatchNormBase,
    DisableTorchFunction,
    compiling_backend,
    not_compiled,
    not_traced,
    parse_to,
)
from lockstep.collectives.communicator import check_agreement
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.module.batch_norm import (
    RefusingOtherBatchNorms,
    convert_sync_batch_norm,
    has_sync_batch_norm,
    normalising_single_row,
)
from lockstep.mirroring.module.buffers import BufferAverages, weights_digest
from lockstep.mirroring.module.compile import Compilation, CompiledCopies, SurroundingCompile
from lockstep.mirroring.module.copies import Copyings, storage_groups, uses_channels_last
from lockstep.mirroring.module.copy_follower import CopyFollower
from lockstep.mirroring.module.wrappers import with_memory
from lockstep.mirroring.partition import PartitionPolicy
from lockstep.replicas.context import ReplicaContext, get_replica_context, own_context, refuse_in_replica
from lockstep.replicas.device.streams import allocating_on
from lockstep.replicas.owner import Owner

if TYPE_CHECKING:
    from lockstep.mirroring.optim.gradient_sums import GradientSums

_CONVERSION_ERROR = "the devices and dtypes of a mirrored module are fixed; convert the module before mirroring it"
_INIT_MARK = "_made"


def _member(name: str) -> property:
    """One of ``nn.Module``'s dicts, which functions of torch read: it is the current copy's."""
    # A property with a setter, since nn.Module.__init__ sets it. torch.func.functional_call reads these dicts, not
    # named_parameters() (test_torch_s_functional_call_takes_it).
    return property(lambda self: getattr(self._copy(), name), lambda self, value: self.__dict__.update({name: value}))


def _method(name: str) -> Callable[..., Any]:
    """A method of the current copy; outside replicas, of the user's module, which all copies follow."""

    def call(self: MirroredModule, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._copy(), name)(*args, **kwargs)

    call.__doc__ = f"{name} of the current replica's copy; outside replicas, of the user's module."
    return call


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on the current copy: containers such as Sequential have items."""
    return lambda self, *args: function(self._copy(), *args)


_NO_BLOCK = nullcontext()
OnReturn = Callable[[Any], None]
OnCall = Callable[["MirroredModule", Any, Any], OnReturn | None]


def _returned(on_return: Sequence[OnReturn | None], outputs: Any) -> Any:
    for callback in on_return:
        if callback is not None:
            callback(outputs)
    return outputs


class MirroredModule(nn.Module):
    """A module with one copy for each replica. Made by ``strategy.mirror(module)``.

    In a replica, calls, ``parameters()`` and attributes are those of the replica's copy; outside replicas they are the
    user's module's. ``load_state_dict``, ``train``, ``eval`` and ``apply`` affect all copies. Floating-point buffers,
    such as batch-norm statistics, are each replica's own and are averaged when read outside replicas.

    Attributes:
        copy_follower: brings what is set on the user's module to all copies.
        pipeline: runs a step through a pipeline stage, which cannot be called by itself; else None.
        is_part: whether other workers hold other parts of the model.
        shards_weights: whether each worker holds a shard of the weights, so that all must make every pass.
        on_call: called with this module and the arguments of each call in a replica. What they return, unless None, is
            called with the outputs.
        is_channels_last: whether mirroring has given the weights that memory format.
        is_in_first_run: whether copies have hooks that watch a first run; a torch.compile around it compiles the next.
    """

    _parameters = _member("_parameters")
    _buffers = _member("_buffers")
    _modules = _member("_modules")
    _non_persistent_buffers_set = _member("_non_persistent_buffers_set")

    def __init__(
        self,
        owner: Owner,
        copies: Sequence[nn.Module],
        partition: PartitionPolicy,
        peers: Callable[[], Iterable[CopyFollower]],
        sync_batchnorm: bool,
        *,
        is_channels_last: bool = False,
    ) -> None:
        super().__init__()
        devices, workers = owner.devices, partition.peers(owner.workers)
        self._owner = owner
        self._copies = tuple(copies)  # nn.Module does not register what a tuple holds: no prefix in any name
        self._groups = storage_groups(devices)
        self._workers = workers
        self.pipeline = partition.pipeline(copies[0])
        self.is_part = partition.parts
        self.shards_weights = partition.shards_weights
        alone = len(copies) == 1 and (workers.is_single or self.is_part or self.shards_weights)
        on = [device.torch_device for device in devices]
        self.copy_follower = CopyFollower(self._copies, on, self._groups, peers, alone=alone)
        self.has_sync_batchnorm = has_sync_batch_norm(copies[0])
        self.gradient_sums: Callable[[], Iterable[GradientSums]] = tuple
        self._buffer_averages = BufferAverages(self._copies, workers)
        self._replicas_to_check = set(range(len(copies))) if sync_batchnorm else set()
        self._compiled_copies: CompiledCopies | None = None
        self._surrounding_compile = SurroundingCompile(self._copies)
        self.is_channels_last = is_channels_last
        self.on_call: list[OnCall] = []
        self.is_in_first_run = False
        self.__dict__[_INIT_MARK] = True

    @property
    def module(self) -> nn.Module:
        """The user's own module, which is replica 0's copy."""
        return self._copies[0]

    @property
    def copies(self) -> tuple[nn.Module, ...]:
        """One copy for each local replica."""
        return self._copies

    @not_traced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the current replica's copy; outside replicas, the user's module."""
        backend, context = compiling_backend(), own_context(self._owner, "module")
        if backend is not None:
            return self._forward_in_compile(backend, args, kwargs)
        if context is None:
            self._prepare_outside(self.module)
            return self.module(*args, **kwargs)
        copy = self._copies[context.local_replica]
        block, on_return = self._prepare(copy, context, args, kwargs)
        # Inside a function mode, such as that for one row, the compiled code is not used: its graph has no modes.
        if self._compiled_copies is not None and isinstance(block, nullcontext):
            return self._compiled_copies(context.local_replica, copy.training, args, kwargs)
        if block is _NO_BLOCK:
            outputs = copy(*args, **kwargs)
        else:
            with block:
                outputs = copy(*args, **kwargs)
        return _returned(on_return, outputs) if on_return else outputs

    @not_compiled
    def _forward_in_compile(self, backend: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same in a torch.compile of the program around the mirrored module, whose backend compiles the copy."""
        copy, context = self._copy(), get_replica_context()
        if context is None:
            self._prepare_outside(copy)
            return copy(*args, **kwargs)
        block, on_return = self._prepare(copy, context, args, kwargs)
        if not isinstance(block, nullcontext) or self.is_in_first_run or self._meets_others:
            with block:
                outputs = copy(*args, **kwargs)
        elif self._compiled_copies is not None:
            outputs = self._compiled_copies(context.local_replica, copy.training, args, kwargs)
        else:
            outputs = self._surrounding_compile(backend, context.local_replica, copy.training, args, kwargs)
        return _returned(on_return, outputs)

    def _prepare_outside(self, copy: nn.Module) -> None:
        if copy.training and self._workers.is_single and len(self._copies) > 1:
            self.sync_buffers()  # this pass updates the statistics of all replicas

    def _prepare(
        self, copy: nn.Module, context: ReplicaContext, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[AbstractContextManager[object], list[OnReturn | None]]:
        """Before a call in a replica: the block that it runs in, and what is called with its outputs."""
        on_return = [callback(self, args, kwargs) for callback in self.on_call] if self.on_call else []
        self._buffer_averages.passed = True
        alone = self._workers.num_replicas == 1  # a batch of one row is the user's own then
        block: AbstractContextManager[object] = _NO_BLOCK if alone else normalising_single_row(copy, args, kwargs)
        if context.local_replica in self._replicas_to_check and copy.training and not alone:
            self._replicas_to_check.discard(context.local_replica)
            block = RefusingOtherBatchNorms()
        return block, on_return

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without sending them to other workers, as DDP's ``no_sync`` does.

        Use it for the backward passes before the last one of an optimizer step; the next one outside the block sends
        what has been accumulated. The numbers are the same without it. In a replica it affects that replica's passes,
        outside those of all local ones. With ``shard_parameters`` every pass sends: no worker has memory for whole
        gradients.
        """
        context = get_replica_context()
        replicas = range(len(self._copies)) if context is None else (context.local_replica,)
        with ExitStack() as stack:
            for sums in self.gradient_sums():
                stack.enter_context(sums.sending_paused(self.module, replicas))
            yield

    def compile_as(self, compilation: Compilation | None) -> None:
        """Compiles all copies with ``torch.compile`` for calls in replicas; None undoes it."""
        if compilation is not None and self._meets_others:
            raise ConfigError(
                "a module with sync_batchnorm, or divided among workers, meets other replicas in its forward, which "
                "torch.compile cannot follow; leave compile_module out"
            )
        self._compiled_copies = None if compilation is None else CompiledCopies(self._copies, compilation)

    @property
    def is_compiled(self) -> bool:
        return self._compiled_copies is not None

    @property
    def _meets_others(self) -> bool:
        """Whether its forward exchanges something with other replicas."""
        return self.has_sync_batchnorm or self.is_part or self.shards_weights

    @property
    def has_others(self) -> bool:
        """Whether there are several replicas, in this worker or in others."""
        return self._workers.num_replicas > 1

    def compare_weights(self) -> None:
        """Raises CollectiveError if another worker has other weights. Every worker must call it."""
        if not self._workers.is_single and not self.shards_weights:
            self._workers.add_digest(weights_digest(self.module))
            self._workers.all_gather_numbers("comparison of the weights")

    def align(self) -> bool:
        """Before a run, on every worker: averages buffers if it is due, and brings what was set to all copies.

        Returns whether any copy has new weights, buffers or submodules, or weights in other memory.
        """
        if self._buffer_averages.begin_run():
            self.sync_buffers()
        has_moved = self.copy_follower.before_run()
        fresh = self.copy_follower.take_fresh()
        if not fresh or self._workers.is_single or self.shards_weights:
            return has_moved
        shapes = [f"{first.dtype} {tuple(first.shape)}" for first, *_ in fresh]
        check_agreement(self._workers, "what was set on the model", shapes)
        with torch.no_grad():
            self._workers.broadcast("the chief's new weights", with_memory(copies[0] for copies in fresh))
            for first, *rest in fresh:
                for tensor in rest:
                    if tensor.data_ptr() != first.data_ptr():
                        tensor.copy_(first)
        return has_moved

    def sync_buffers(self) -> None:
        """Writes the averages of floating-point buffers, and replica 0's other buffers, to all copies.

        Every worker must call it. Then each may read the state by itself until replicas train again.
        """
        refuse_in_replica("sync_buffers")
        self.copy_follower.bring_changes()
        with torch.no_grad():
            for buffers, mean in zip(self._buffer_averages.buffers, self._buffer_averages.exchange(), strict=True):
                for buffer in buffers:
                    buffer.copy_(mean)
        self._buffer_averages.note_equal()
        self.copy_follower.remember()

    def exchange_buffers(self, *, always: bool = True) -> None:
        """Averages the buffers of all workers for later reads, without changing them. Every worker must call it.

        Unless ``always``, only if a run since the last exchange can have changed buffers.
        """
        if not self._workers.is_single and (always or self._buffer_averages.trained):
            self.copy_follower.bring_changes()
            with torch.no_grad():
                self._buffer_averages.exchange()

    def stored_parameters(self) -> list[list[nn.Parameter]]:
        """The parameters in each storage of this worker, in one order: all weights, or this worker's parts."""
        return [list(self._copies[group[0]].parameters()) for group in self._groups]

    @contextmanager
    def writing_weights(self) -> Iterator[None]:
        """A block, outside replicas, that writes the same numbers to the parameters of each storage, on all workers."""
        refuse_in_replica("writing_weights")
        self.copy_follower.bring_changes()
        with torch.no_grad():
            yield
        self.copy_follower.remember()

    def note_pass(self) -> None:
        """Notes that a local replica has run its copy without calling this object."""
        self._buffer_averages.passed = True

    def train(self, mode: bool = True) -> MirroredModule:
        """Sets the training mode of the current replica's copy; outside replicas, of all copies.

        Outside, ``eval()`` also averages the buffers; with several workers, who must all take part, the next run does.
        """
        if get_replica_context() is not None:
            copy = self._copy().train(mode)
            self._buffer_averages.set_mode_in_replica(copy, mode)
            return self
        self._buffer_averages.mode_in_replicas = False
        for duplicate in self._copies:
            duplicate.train(mode)
        self.training = mode
        if not mode and self._workers.is_single:
            self.sync_buffers()
        return self

    named_parameters = _method("named_parameters")
    named_modules = _method("named_modules")
    named_children = _method("named_children")
    add_module = _method("add_module")
    register_buffer = _method("register_buffer")

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of the current copy by name; outside replicas, their averages, as in ``state_dict``."""
        buffers = self._copy().named_buffers(prefix, recurse, remove_duplicate)
        if get_replica_context() is not None:
            yield from buffers
            return
        averages = self._averages()
        for name, buffer in buffers:
            yield name, averages.get(buffer.data_ptr(), buffer) if buffer.numel() else buffer

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state of the current copy, with the plain module's keys; outside replicas, with averaged buffers.

        If the model is divided among workers, all of them must call it.

        Raises:
            UsageError: other workers may have changed their buffers since the last ``sync_buffers``.
        """
        outside = get_replica_context() is None
        if outside and self.is_part:
            self.exchange_buffers()
        state: dict[str, Any] = self._copy().state_dict(*args, **kwargs)
        if outside:
            averages = self._averages()
            for key, value in state.items():
                # By address, since state_dict has detached tensors; all tensors without elements have the address 0.
                if isinstance(value, torch.Tensor) and value.numel():
                    state[key] = averages.get(value.data_ptr(), value)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state into every copy. Outside replicas only, and not with ``assign=True``."""
        refuse_in_replica("load_state_dict")
        if assign:
            raise UsageError("load_state_dict(assign=True) would separate the replicas' weights; use assign=False")
        result = self.module.load_state_dict(state_dict, strict=strict)
        self._spread()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the current copy; outside replicas, of all copies."""
        with DisableTorchFunction():  # otherwise the step guard takes this for an access by the step
            for duplicate in self._copies if get_replica_context() is None else [self._copy()]:
                duplicate.zero_grad(set_to_none)

    def apply(self, fn: Callable[[nn.Module], None]) -> MirroredModule:
        """Applies ``fn`` to the user's module and its children, then gives all copies the same weights."""
        refuse_in_replica("apply")
        self.module.apply(fn)
        self._spread()
        return self

    def to(self, *args: Any, **kwargs: Any) -> MirroredModule:
        """Does nothing if the module has this device and dtype; otherwise raises UsageError."""
        device, dtype, *_ = parse_to(*args, **kwargs)
        for tensor in self.module.parameters():
            converts = dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype
            if converts or (device is not None and torch.empty(0, device=device).device != tensor.device):
                raise UsageError(_CONVERSION_ERROR)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        raise UsageError(_CONVERSION_ERROR)

    def __getattr__(self, name: str) -> Any:
        copies = self.__dict__.get("_copies")
        # Before __init__ has set the copies, _copy would ask for them here without an end. Names with "__" belong to
        # protocols, such as pickle's: what the class does not have must not come from the user's module.
        if copies is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        copy = self._copy()
        value = getattr(copy, name)
        if len(copies) > 1 and value is copy._buffers.get(name) and value is not None and get_replica_context() is None:
            mean = self._averages().get(value.data_ptr(), value)
            return value if mean.data_ptr() == value.data_ptr() else mean
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets it on the current replica's copy; outside replicas, on the user's module and so on all copies."""
        attributes = self.__dict__
        # While __init__ runs, nn.Module's own attributes are set on this object and not on a copy.
        if _INIT_MARK not in attributes:
            super().__setattr__(name, value)
            return
        if name in attributes or name == "_compiled_call_impl" or isinstance(vars(MirroredModule).get(name), property):
            object.__setattr__(self, name, value)
        if name == "training" or name not in attributes:
            setattr(self._copy(), name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._copy(), name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers it on all copies. Outside replicas only."""
        refuse_in_replica("register_parameter")
        self._copy().register_parameter(name, param)

    __getitem__ = _operator(operator.getitem)
    __setitem__ = _operator(operator.setitem)
    __delitem__ = _operator(operator.delitem)
    __contains__ = _operator(operator.contains)
    __len__ = _operator(len)
    __iter__ = _operator(iter)
    __reversed__ = _operator(reversed)
    __bool__ = _operator(bool)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._copy())})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a mirrored module belongs to its strategy and cannot be copied or pickled; copy your own module "
            "(mirrored.module), as for AveragedModel, or save its state_dict()"
        )

    def __repr__(self) -> str:
        return f"MirroredModule({len(self._copies)} replicas of {self.module!r})"

    def _copy(self) -> nn.Module:
        context = own_context(self._owner, "module")
        return self._copies[0 if context is None else context.local_replica]

    def _spread(self) -> None:
        self.copy_follower.bring_changes()
        with torch.no_grad():
            weights = [] if self.shards_weights else list(self.module.parameters())
            self._workers.broadcast("loaded weights", with_memory([*weights, *self.module.buffers()]))
            for leader in (group[0] for group in self._groups[1:]):
                for source, target in zip(self.module.parameters(), self._copies[leader].parameters(), strict=True):
                    target.copy_(source)
            for first, *rest in self._buffer_averages.buffers:
                for buffer in rest:
                    buffer.copy_(first)
            self._buffer_averages.note_equal()
        self.copy_follower.remember()

    def _averages(self) -> dict[int, torch.Tensor]:
        """By the address of a buffer of the user's module."""
        self.copy_follower.bring_changes()
        with torch.no_grad():
            copies, means = self._buffer_averages.buffers, self._buffer_averages.read()
        for buffers, mean in zip(copies, means, strict=True):
            self.copy_follower.remember_read(mean, buffers)
        return {buffers[0].data_ptr(): mean for buffers, mean in zip(copies, means, strict=True)}


MemoryFormat = Literal["auto", "preserve"] | torch.memory_format


def mirror_module(
    owner: Owner,
    module: nn.Module,
    partition: PartitionPolicy,
    peers: Callable[[], Iterable[CopyFollower]],
    sync_batchnorm: bool,
    memory_format: MemoryFormat,
) -> MirroredModule:
    """Makes a copy of ``module`` for each device. The first is ``module`` itself, moved to its device in place.

    All workers get the chief's weights. ``peers`` returns the followers of all modules of the owner.
    """
    devices, workers = owner.devices, partition.peers(owner.workers)
    _check_can_be_mirrored(module)
    # Using torch.nn.SyncBatchNorm asks for synchronised statistics. In training its forward needs torch.distributed.
    convert_sync_batch_norm(module, BatchNormBase if sync_batchnorm else nn.SyncBatchNorm)
    target_format = _memory_format_of(module, memory_format)
    with allocating_on(devices[0]):
        _move_user_module(module, devices[0], target_format)
    if not workers.is_single and not partition.shards_weights:
        check_agreement(workers, "the model", signature(module))
        with torch.no_grad():
            workers.broadcast("the chief's weights", with_memory([*module.parameters(), *module.buffers()]))
    # After the broadcast: copies with storage of their own then have the chief's weights without another one.
    copyings = Copyings(module, [device.torch_device for device in devices], storage_groups(devices), peers())
    copies = [module]
    for replica, device in enumerate(devices[1:], start=1):
        with allocating_on(device):
            copies.append(copyings[replica].of(module, type(module).__name__))
    is_channels_last = target_format not in (None, torch.contiguous_format)
    return MirroredModule(owner, copies, partition, peers, sync_batchnorm, is_channels_last=is_channels_last)


def _check_can_be_mirrored(module: nn.Module) -> None:
    for name, part in (child for parent in module.modules() for child in parent._modules.items()):
        if isinstance(part, MirroredModule):
            raise UsageError(
                f"{type(module).__name__} has a mirrored module in it, as {name!r}; put the plain module there "
                "(mirrored.module), of which each replica has one copy"
            )
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise UsageError("the module has lazy parameters without a shape; call it once on a batch before mirroring it")
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigError(
            f"{type(module).__name__} is on the meta device and has no numbers yet; ls.ParallelStrategy gives such a "
            'model its first ones, for any other make it outside torch.device("meta")'
        )


def signature(module: nn.Module) -> list[str]:
    """One line for each parameter and buffer, to be compared between workers."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}" for name, tensor in tensors]


def _move_user_module(module: nn.Module, device: LogicalDevice, memory_format: torch.memory_format | None) -> None:
    """Moves the user's module to the first replica's device, in place."""
    tensors = [*module.parameters(), *module.buffers()]
    is_there = any(tensor.device == device.torch_device for tensor in tensors)
    module.to(device.torch_device)
    if (
        device.memory_limit is not None
        and is_there
        and all(type(parameter) is nn.Parameter for parameter in module.parameters())
    ):
        # Weights that are on the GPU already are copied into the memory that counts for its share.
        module._apply(torch.clone)  # type: ignore[no-untyped-call]
    if memory_format is not None:
        module.to(memory_format=memory_format)  # type: ignore[call-overload]


def _memory_format_of(module: nn.Module, memory_format: MemoryFormat) -> torch.memory_format | None:
    if isinstance(memory_format, torch.memory_format):
        return memory_format
    if memory_format not in ("auto", "preserve"):
        choices = '"auto", "preserve", torch.channels_last or torch.contiguous_format'
        raise ConfigError(f"memory_format={memory_format!r} is unknown; choose {choices}")
    return torch.channels_last if memory_format == "auto" and uses_channels_last(module) else None
