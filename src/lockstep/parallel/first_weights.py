"""The numbers that a model made on the meta device begins with, made one tensor at a time.

    meta module -> which module's own way of initialising writes which tensor        no memory
    make(name)  -> the tensor whole, from numbers that depend on the seed and its name alone

So a worker that holds a part of the model makes the tensors of its part, cuts its share out of each, and never holds
more than one of them whole; and the model begins with the same bits however it is divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.parallel.writes import Writes
from lockstep.replicas.random import DEFAULT_GENERATOR_LOCK


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
    writes: Writes

    def reaches(self, tensor: str) -> bool:
        """Whether it writes a tensor of the module, or of one inside it."""
        inside = not self.module or tensor.startswith(f"{self.module}.")
        return inside and tensor in self.writes.written


class FirstWeights:
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
                    with Writes({**self._blanks, name: whole}, only=name):
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
        with Writes(self._blanks) as writes:
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
