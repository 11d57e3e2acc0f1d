"""A part of a model on the worker's device: what torch has divided is there already, the rest is moved here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep._torch_compat import TorchDispatchMode
from lockstep.errors import ConfigError
from lockstep.replicas.rng.mode import DEFAULT_GENERATOR_LOCK

_OVERWRITING = frozenset(
    f"aten::{name}"
    for name in ("normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "bernoulli_", "exponential_")
)


class InitTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what runs in it from writing into any tensor of a model but one, and notes what it writes, or would.

    Args:
        tensors: those of the model, by name; each has its own storage.
        only: the name of the one that may be written; None for none.
    """

    def __init__(self, tensors: Mapping[str, Tensor], only: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_storage(tensor): name for name, tensor in tensors.items()}
        self._only = only
        self._overwritten: dict[str, int] = {}
        self._adjusted: set[str] = set()

    @property
    def written(self) -> frozenset[str]:
        """The names of all tensors that are written, in part at least."""
        return frozenset(self._adjusted | self._overwritten.keys())

    def overwritten(self, name: str) -> int:
        """How many numbers of a tensor are written whatever they were, before any is made from what it was."""
        return self._overwritten.get(name, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        targets = list(_targets(func, args, kwargs or {}))
        named = [(name, each) for each in targets if (name := self._names.get(_storage(each))) is not None]
        for name, target in named:
            self._note(func, name, target)
        if any(name != self._only for name, _ in named):
            return targets[0]  # as what writes in place does
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, name: str, target: Tensor) -> None:
        if func._schema.name not in _OVERWRITING:
            self._adjusted.add(name)
        elif name not in self._adjusted:
            self._overwritten[name] = self._overwritten.get(name, 0) + target.numel()


def _targets(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator of torch writes into."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors({**given, **kwargs}.get(argument.name))


def _tensors(value: Any) -> Iterable[Tensor]:
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Tensor)]


def _storage(tensor: Tensor) -> int:
    """A number for what a tensor shares with its views, and with nothing else while it is there."""
    return int(tensor.untyped_storage()._cdata)


@runtime_checkable
class Initialises(Protocol):
    """A model of transformers, or one that does as these do: it initialises each of its modules."""

    config: Any

    def _init_weights(self, module: nn.Module) -> None:
        """Writes the initial values of a module's own tensors."""


@runtime_checkable
class Resets(Protocol):
    """A module of torch, or one that does as these do."""

    def reset_parameters(self) -> None:
        """Writes the initial values of the module's own tensors."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A module's way of initialising, and what it writes."""

    module: str
    run: Callable[[], None]
    writes: InitTracer

    def reaches(self, tensor: str) -> bool:
        """Whether it writes a tensor of the module, or of one inside it."""
        inside = not self.module or tensor.startswith(f"{self.module}.")
        return inside and tensor in self.writes.written


class DeferredInit:
    """The initial values of a whole model.

    A tensor that has several names is initialised as the first of them says. What the model's constructors did beyond
    transformers' ``_init_weights`` and torch's ``reset_parameters`` is not repeated.

    Args:
        module: whole, some of its tensors on the meta device. It is left as it is.
        seed: what the numbers are drawn from, beside the names.

    Raises:
        ConfigError: a tensor whose initial values nothing in the model tells.
    """

    def __init__(self, module: nn.Module, seed: str) -> None:
        self._module, self._seed = _twin(module, {}), seed
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
        """How much memory ``make`` takes for a parameter or buffer."""
        blank = self._blanks[self._firsts[name]]
        return blank.numel() * blank.element_size()

    def make(self, name: str, memory: Tensor | None = None) -> Tensor:
        """The initial values of a parameter or buffer, whole, on the CPU; the same whenever it is called.

        Args:
            name: any of its names in the whole model.
            memory: [bytes or more] uint8, in which it is made; None is new memory. Made in the same memory one after
                another, tensors leave no holes among those that stay.

        Raises:
            ConfigError: they are made from other tensors of the model.
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
        """Has the model hold ``whole`` in place of the tensor without memory."""
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
        """All ways of initialising, in the order in which they come when a model is made, inner modules first."""
        modules = dict(reversed(list(self._module.named_modules())))
        models = [name for name, part in modules.items() if isinstance(part, Initialises)]
        for name, part in modules.items():
            if isinstance(part, nn.MultiheadAttention):
                yield self._seen(name, part._reset_parameters)
            elif isinstance(part, Resets):
                yield self._seen(name, part.reset_parameters)
        for name in modules:
            above = max((model for model in models if _is_in(name, model)), key=len, default=None)
            if above is not None:
                yield self._seen(name, _initialise(modules[above], modules[name]))

    def _seen(self, name: str, run: Callable[[], None]) -> _Call:
        with InitTracer(self._blanks) as writes:
            _run(name, run)
        return _Call(module=name, run=run, writes=writes)

    def _chosen(self, name: str, calls: Sequence[_Call]) -> list[_Call]:
        """Of the calls that write a tensor, the last that does not ask what was there, and those after it."""
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


def _twin(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """The same modules anew around the same tensors, so that either can be changed without the other."""
    if id(module) not in known:
        known[id(module)] = twin = object.__new__(type(module))
        twin.__dict__ = dict(module.__dict__)
        twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
        children = module._modules.items()
        twin._modules = {name: child if child is None else _twin(child, known) for name, child in children}
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


def _initialise(model: Any, part: nn.Module) -> Callable[[], None]:
    def run() -> None:
        model._init_weights(part)

    return run


def _run(module: str, run: Callable[[], None]) -> None:
    try:
        run()
    except (NotImplementedError, RuntimeError) as error:  # what torch raises for numbers that are not there
        raise ConfigError(
            f"the first values of {module or 'the model'} cannot be made on the meta device ({error}); make the model "
            'outside torch.device("meta")'
        ) from error


@contextmanager
def _drawing_from(number: int) -> Iterator[None]:
    """Has torch's default generator begin with a number, and stand where it stood afterwards."""
    with DEFAULT_GENERATOR_LOCK:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(number)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


def local_shard(whole: Tensor, like: Tensor, order: Tensor | None = None) -> Tensor:
    """What of a tensor this worker holds. Nothing is sent.

    Args:
        whole: the tensor, of any device and dtype.
        like: the worker's own, which may be a DTensor, and without memory.
        order: the column that stands in each place, where the model's columns were put in another order.

    Returns:
        A plain tensor; where a share is all, it may be ``whole`` itself.
    """
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
    """Gives all tensors of a divided module that are on the meta device their first values, one after another.

    Args:
        module: a part of the model; its ties stay.
        weights: the whole model's.
        orders: as ``Division.orders`` has them.
        device: where they go; None is the CPU.
    """
    blanks = list(_blanks(module))
    most = max((weights.bytes_of(name) for name, _, _ in blanks), default=0)
    memory = torch.empty(most, dtype=torch.uint8, device="cpu")
    filled: dict[int, tuple[Tensor, Tensor]] = {}  # beside the new one the old, so that no other gets its id
    for name, held, attribute in blanks:
        blank = held[attribute]
        if id(blank) not in filled:
            filled[id(blank)] = blank, _filled(blank, weights.make(name, memory), orders.get(name), device)
        held[attribute] = filled[id(blank)][1]


def _blanks(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Of each tensor on the meta device its name, what holds it, and under which attribute."""
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
        own = own.clone()  # what is made next takes the whole's memory
    if isinstance(blank, DTensor):
        own = DTensor.from_local(
            own, blank.device_mesh, blank.placements, run_check=False, shape=blank.shape, stride=blank.stride()
        )
    if isinstance(blank, nn.Parameter):
        return nn.Parameter(own, requires_grad=blank.requires_grad)
    return own


@torch.no_grad()
def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Moves the tensors of a module that are elsewhere, in place, one by one.

    Parameters stay the objects that they are, so that tied ones stay tied and an optimizer keeps its own.

    Args:
        module: a divided model, no part of it on the meta device.
        device: of this worker.
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
