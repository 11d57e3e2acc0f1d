"""Random numbers of Keras's layers as operators that take a seed, for code that is compiled.

Keras makes a generator, sets its seed and draws. A graph of operators can hold no generator, and the seed, a tensor,
has no value while a model is traced. So each draw becomes an operator, which makes the generator as Keras does: it
gives the numbers that the layer draws uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from keras.src.random.seed_generator import draw_seed
from torch import Tensor
from torch.overrides import TorchFunctionMode

_Seeds = dict[torch.Generator, Tensor]
_seeds: ContextVar[_Seeds | None] = ContextVar("lockstep_keras_seeds", default=None)
"""The seeds [2] that generators stand for while a model is traced."""


@contextmanager
def draws_by_operators() -> Iterator[None]:
    """A block in which this thread's draws of Keras are operators that take the seed."""
    seeds: _Seeds = {}
    token = _seeds.set(seeds)
    try:
        with _Draws(seeds):
            yield
    finally:
        _seeds.reset(token)


class _Draws(TorchFunctionMode):
    def __init__(self, seeds: _Seeds) -> None:
        super().__init__()
        self._seeds = seeds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = dict(kwargs or {})
        seed = self._seeds.get(arguments.pop("generator", None))
        return func(*args, **(kwargs or {})) if seed is None else _OPERATORS[func](seed, *args, **arguments)


def standing_for_seed(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``torch_seed_generator`` of Keras, whose generator stands for the seed while a model is traced."""

    @wraps(original)
    def generator(seed: Any) -> Any:
        seeds = _seeds.get()
        if seeds is None:
            return original(seed)
        stand_in = torch.Generator()
        seeds[stand_in] = draw_seed(seed)
        return stand_in

    return generator


# An operator can stand in a compiled graph, and a torch.Generator cannot. The graph has the seed as its input, so that
# each call draws other numbers.
@torch.library.custom_op(
    "lockstep::seeded_draw",
    mutates_args=(),
    schema="(Tensor seed, str method, float[] numbers, Tensor like) -> Tensor",
)
def _seeded_draw(seed: Tensor, method: str, numbers: Sequence[float], like: Tensor) -> Tensor:
    """Draws by a method of tensors with these arguments: into one like ``like``, or from its probabilities."""
    # As in ``torch_seed_generator`` of Keras.
    generator = torch.Generator(seed.device).manual_seed(int(seed[0] + seed[1]) & 0xFFFFFFFF)
    if method == "bernoulli":
        return torch.bernoulli(like, generator=generator)
    if method == "multinomial":
        return torch.multinomial(like, int(numbers[0]), replacement=True, generator=generator)
    arguments = [int(number) for number in numbers] if method == "random_" else numbers
    drawn: Tensor = getattr(torch.empty_like(like), method)(*arguments, generator=generator)
    return drawn


@_seeded_draw.register_fake
def _(seed: Tensor, method: str, numbers: Sequence[float], like: Tensor) -> Tensor:
    if method == "multinomial":
        return like.new_empty((*like.shape[:-1], int(numbers[0])), dtype=torch.int64)
    return torch.empty_like(like)


def _draw(seed: Tensor, method: str, numbers: Sequence[float], like: Tensor) -> Tensor:
    drawn: Tensor = _seeded_draw(seed, method, numbers, like)
    return drawn


def _uniform(seed: Tensor, size: Sequence[int], **kind: Any) -> Tensor:
    return _draw(seed, "uniform_", [0.0, 1.0], torch.empty(size, **kind))


def _normal(seed: Tensor, mean: float, std: float, size: Sequence[int], **kind: Any) -> Tensor:
    return _draw(seed, "normal_", [mean, std], torch.empty(size, **kind))


def _integers(seed: Tensor, low: int, high: int, size: Sequence[int], **kind: Any) -> Tensor:
    return _draw(seed, "random_", [low, high], torch.empty(size, **kind))


def _bernoulli(seed: Tensor, probabilities: Tensor) -> Tensor:
    return _draw(seed, "bernoulli", [], probabilities.detach())


def _multinomial(seed: Tensor, probabilities: Tensor, number: int, replacement: bool) -> Tensor:
    return _draw(seed, "multinomial", [number], probabilities.detach())


_OPERATORS: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _uniform,
    torch.normal: _normal,
    torch.randint: _integers,
    torch.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
}
