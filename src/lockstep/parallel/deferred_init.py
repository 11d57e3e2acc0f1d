"""Deferred initialisation: a worker's part of a model that was made on the meta device gets its initial values.

Each tensor is initialised whole, by the model's functions and from a seed of its name, and this worker keeps its shard;
so the values do not depend on how the model is divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep._torch_compat import TorchDispatchMode
from lockstep.errors import ConfigError
from lockstep.replicas.rng.mode import default_generator_as

_OVERWRITING = frozenset(
    f"aten::{name}"
    for name in ("normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "bernoulli_", "exponential_")
)


class InitTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Prevents writes into all ``tensors`` of a model but ``only`` one, and records which would be written."""

    def __init__(self, tensors: Mapping[str, Tensor], only: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_storage(tensor): name for name, tensor in tensors.items()}
        self._only = only
        self._overwritten: dict[str, int] = {}
        self._adjusted: set[str] = set()

    @property
    def written(self) -> frozenset[str]:
        return frozenset(self._adjusted | self._overwritten.keys())

    def overwritten(self, name: str) -> int:
        """How many elements of a tensor are overwritten before any is computed from its old values."""
        return self._overwritten.get(name, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        targets = list(_targets(func, args, kwargs or {}))
        named = [(name, each) for each in targets if (name := self._names.get(_storage(each))) is not None]
        for name, target in named:
            self._note(func, name, target)
        if any(name != self._only for name, _ in named):
            return targets[0]  # as an in-place operator does
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, name: str, target: Tensor) -> None:
        if func._schema.name not in _OVERWRITING:
            self._adjusted.add(name)
        elif name not in self._adjusted:
            self._overwritten[name] = self._overwritten.get(name, 0) + target.numel()


def _targets(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = {**given, **kwargs}.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            yield from (each for each in values if isinstance(each, Tensor))


def _storage(tensor: Tensor) -> int:
    """An id that a tensor shares with its views, and with no other while it lives."""
    return int(tensor.untyped_storage()._cdata)


@runtime_checkable
class Initialises(Protocol):
    """A model that initialises each of its modules, as those of transformers do."""

    config: Any

    def _init_weights(self, module: nn.Module) -> None:
        """Writes the initial values of a module's own tensors."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A function that initialises a module, and the trace of its writes."""

    module: str
    run: Callable[[], None]
    writes: InitTracer

    def reaches(self, tensor: str) -> bool:
        """Whether it writes a tensor of the module, or of one inside it."""
        inside = not self.module or tensor.startswith(f"{self.module}.")
        return inside and tensor in self.writes.written


class DeferredInit:
    """The initial values of a whole model, some of whose tensors are on the meta device.

    A tensor that has several names is initialised by the first of them. Only transformers' ``_init_weights`` and
    torch's ``reset_parameters`` are run, not what a model's constructors did besides. The model is left as it is.

    Raises:
        ConfigError: a tensor that no function of the model initialises.
    """

    def __init__(self, module: nn.Module, seed: str) -> None:
        self._module, self._seed = _shallow_copy(module, {}), seed
        self._aliases: dict[str, list[str]] = {}
        first: dict[int, str] = {}
        for name, tensor in _named(self._module):
            self._aliases.setdefault(first.setdefault(id(tensor), name), []).append(name)
        self._firsts = {alias: name for name, aliases in self._aliases.items() for alias in aliases}
        every = dict(_named(self._module))
        self._blanks = {name: every[name] for name in self._aliases}
        with torch.no_grad(), torch.device("cpu"), _drawing_from(0):
            calls = list(self._calls())
        self._runs = {name: self._chosen(name, calls) for name, blank in self._blanks.items() if blank.is_meta}

    def bytes_of(self, name: str) -> int:
        """The memory that ``make`` takes for a parameter or buffer."""
        blank = self._blanks[self._firsts[name]]
        return blank.numel() * blank.element_size()

    def make(self, name: str, memory: Tensor | None = None) -> Tensor:
        """The initial values of a parameter or buffer, whole, on the CPU; equal in every call.

        They are made in ``memory``, [bytes or more] uint8, if it is given: made in the same memory one after another,
        tensors leave no holes among those that are kept.

        Raises:
            ConfigError: they are computed from other tensors of the model.
        """
        name = self._firsts[name]
        blank = self._blanks[name]
        if memory is None:
            memory = torch.empty(self.bytes_of(name), dtype=torch.uint8, device="cpu")
        whole = memory[: self.bytes_of(name)].view(blank.dtype).view(blank.shape)
        with torch.no_grad(), torch.device("cpu"), self._placed(name, whole) as whole:
            number = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:8]
            with _drawing_from(int.from_bytes(number, "little", signed=True)):
                for call in self._runs[name]:
                    with InitTracer({**self._blanks, name: whole}, only=name):
                        _run(call.module, call.run)
        return whole.detach()

    @contextmanager
    def _placed(self, name: str, whole: Tensor) -> Iterator[Tensor]:
        """A block in which the model holds ``whole`` in place of the tensor on the meta device."""
        blank = self._blanks[name]
        if isinstance(blank, nn.Parameter):
            whole = nn.Parameter(whole, requires_grad=blank.requires_grad)
        for alias in self._aliases[name]:
            _put(self._module, alias, whole)
        try:
            yield whole
        finally:
            for alias in self._aliases[name]:
                _put(self._module, alias, blank)

    def _calls(self) -> Iterator[_Call]:
        """All initialising functions, in the order in which they run when a model is made, inner modules first."""
        modules = dict(reversed(list(self._module.named_modules())))
        models = [name for name, part in modules.items() if isinstance(part, Initialises)]
        for name, part in modules.items():
            if isinstance(part, nn.MultiheadAttention):
                yield self._traced(name, part._reset_parameters)
            elif callable(reset := getattr(part, "reset_parameters", None)):
                yield self._traced(name, reset)
        for name in modules:
            above = max((model for model in models if _is_in(name, model)), key=len, default=None)
            if above is not None:
                yield self._traced(name, partial(modules[above]._init_weights, modules[name]))

    def _traced(self, name: str, run: Callable[[], None]) -> _Call:
        with InitTracer(self._blanks) as writes:
            _run(name, run)
        return _Call(module=name, run=run, writes=writes)

    def _chosen(self, name: str, calls: Sequence[_Call]) -> list[_Call]:
        """Of the calls that write a tensor, the last that overwrites all of it, and those after it."""
        own = [call for call in calls if call.reaches(name)]
        size = self._blanks[name].numel()
        whole = [number for number, call in enumerate(own) if call.writes.overwritten(name) >= size]
        if not whole and size:
            owner = type(self._module.get_submodule(name.rpartition(".")[0])).__name__
            raise ConfigError(
                f"{name} is on the meta device, and nothing in the model tells its first values; give {owner} a "
                'reset_parameters() that writes it, or make the model outside torch.device("meta")'
            )
        return own[whole[-1] :] if size else []


def _shallow_copy(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """New modules around the same tensors, so that either can be changed without the other."""
    if id(module) not in known:
        known[id(module)] = copied = object.__new__(type(module))
        copied.__dict__ = dict(module.__dict__)
        copied._parameters, copied._buffers = dict(module._parameters), dict(module._buffers)
        children = module._modules.items()
        copied._modules = {name: child if child is None else _shallow_copy(child, known) for name, child in children}
    return known[id(module)]


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    part = module.get_submodule(owner)
    held: dict[str, Any] = part._parameters if isinstance(tensor, nn.Parameter) else part._buffers
    held[attribute] = tensor


def _is_in(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _run(module: str, run: Callable[[], None]) -> None:
    try:
        run()
    except (NotImplementedError, RuntimeError) as error:  # raised by torch where values are needed
        raise ConfigError(
            f"the first values of {module or 'the model'} cannot be made on the meta device ({error}); make the model "
            'outside torch.device("meta")'
        ) from error


def _drawing_from(number: int) -> AbstractContextManager[None]:
    return default_generator_as(torch.Generator().manual_seed(number))


def local_shard(whole: Tensor, like: Tensor, order: Tensor | None = None) -> Tensor:
    """This worker's plain shard of ``whole``, placed as its own tensor ``like``, with columns in ``order``."""
    if not isinstance(like, DTensor):
        return whole if order is None else whole[..., order]
    if order is None:
        cut = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
        return cut.to_local()
    if not like.placements[0].is_shard(whole.ndim - 1):
        return whole[..., order]
    own = distribute_tensor(order, like.device_mesh, [Shard(0)], src_data_rank=None).to_local()
    return whole[..., own.to(whole.device)]


def materialize(
    module: nn.Module, weights: DeferredInit, orders: Mapping[str, Tensor], device: torch.device | None = None
) -> None:
    """Gives all tensors of a worker's part that are on the meta device their initial values, one after another."""
    blanks = list(_blanks(module))
    most = max((weights.bytes_of(name) for name, _, _ in blanks), default=0)
    memory = torch.empty(most, dtype=torch.uint8, device="cpu")
    filled: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the old one too, so that no other gets its id
    for name, held, attribute in blanks:
        blank = held[attribute]
        if id(blank) not in filled:
            filled[id(blank)] = blank, _filled(blank, weights.make(name, memory), orders.get(name), device)
        held[attribute] = filled[id(blank)][1]


def _blanks(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each tensor on the meta device: its name, the dict that holds it, and its key there."""
    for prefix, part in module.named_modules():
        held: dict[str, Any]
        for held in (part._parameters, part._buffers):
            for attribute, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    yield f"{prefix}.{attribute}" if prefix else attribute, held, attribute


@torch.no_grad()
def _filled(blank: Tensor, whole: Tensor, order: Tensor | None, device: torch.device | None) -> Tensor:
    own = local_shard(whole, blank, order)
    own = own if device is None else own.to(device)
    if own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        own = own.clone()  # the memory is for the next tensor
    if isinstance(blank, DTensor):
        own = DTensor.from_local(
            own, blank.device_mesh, blank.placements, run_check=False, shape=blank.shape, stride=blank.stride()
        )
    if isinstance(blank, nn.Parameter):
        return nn.Parameter(own, requires_grad=blank.requires_grad)
    return own


@torch.no_grad()
def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Moves the plain tensors of a divided model to this worker's device, in place, one by one.

    Parameters stay the same objects, so that tied ones stay tied and an optimizer keeps its own.
    """
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and _is_elsewhere(parameter, device):
                parameter.data = parameter.data.to(device)
        for name, buffer in part._buffers.items():
            if buffer is not None and _is_elsewhere(buffer, device):
                part._buffers[name] = buffer.to(device)


def _is_elsewhere(tensor: Tensor, device: torch.device) -> bool:
    return not isinstance(tensor, DTensor) and tensor.device != device
