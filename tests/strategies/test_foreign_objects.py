"""Nothing that looks at a program touches objects that it does not know: no attribute, comparison, length or truth."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import MakeStrategy
from torch import nn

import lockstep as ls

BATCHES = [torch.arange(12.0).reshape(6, 2)] * 3
TOUCHED: list[str] = []
_OPERATORS = ("__eq__", "__ne__", "__hash__", "__bool__", "__len__", "__iter__", "__getitem__", "__contains__")


class Absent:
    """A module that is not installed, and imported when it is used: as KerasHub's LazyModule for tensorflow."""

    def __deepcopy__(self, memo: Any) -> Absent:
        return self

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"this requires the module, and {name} was read")


class Proxy:
    """Notes whatever is read of it, but for ``copy.deepcopy``."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__deepcopy__":
            return lambda memo: self
        TOUCHED.append(name)
        raise ImportError(f"{name} was read")


def _noting(name: str) -> Callable[..., Any]:
    def touched(self: Any, *args: Any) -> Any:
        TOUCHED.append(name)
        raise ImportError(f"{name} was called")

    return touched


for _name in _OPERATORS:
    setattr(Proxy, _name, _noting(_name))

absent, proxy = Absent(), Proxy()


class Settings:
    """An object of the user's that holds such an object."""

    def __init__(self) -> None:
        self.lazy, self.proxy, self.count = absent, proxy, 0


settings = Settings()


def names_them(x: torch.Tensor) -> torch.Tensor:
    if x is None:
        absent.use(proxy, settings)
    random.random()  # so that the functions which may have drawn are looked for
    np.random.rand()
    return x * 2


def in_a_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    lazy, other, held = absent, proxy, settings

    def step(x: torch.Tensor) -> torch.Tensor:
        if x is None:
            lazy.use(other, held)
        return x * 2

    return step


class Loop:
    def __init__(self) -> None:
        self.lazy, self.proxy, self.settings = absent, proxy, settings

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Stepper:
    """A step that is an object, and has attributes of any name."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def __getattr__(self, name: str) -> Any:
        TOUCHED.append(name)
        raise ImportError(f"{name} was read")


def with_them(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x * 2


STEPS = {
    "globals": names_them,
    "closure": in_a_closure(),
    "method": Loop().step,
    "partial": lambda x: partial(with_them, x, absent, proxy)(),
    "object": Stepper(),
}


@pytest.fixture(autouse=True)
def untouched() -> None:
    TOUCHED.clear()


@pytest.mark.filterwarnings("ignore:the step")
@pytest.mark.parametrize("name", STEPS)
def test_a_step_may_reach_what_cannot_be_read(make_strategy: MakeStrategy, name: str):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.Linear(2, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        mirrored(x).sum().backward()
        return STEPS[name](x)

    for x in strategy.distribute_dataset(BATCHES):
        strategy.run(step, (x,))
        results = strategy.run(STEPS[name], (x,))
        assert torch.equal(torch.cat(results.values), BATCHES[0] * 2)

    assert TOUCHED == []


def test_arguments_and_results_may_be_what_cannot_be_read(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def step(x: torch.Tensor, lazy: Any, other: Any, each: Any) -> Any:
        return lazy, other, each, x.sum()

    for x in strategy.distribute_dataset(BATCHES):
        lazy, other, several, _ = strategy.run(step, (x, absent, proxy, ls.PerReplica([Proxy(), Proxy()])))
        assert lazy is absent
        assert other is proxy
        assert len(several) == 2

    assert TOUCHED == []


class Hook:
    """A hook that is an object with attributes of any name."""

    def __init__(self) -> None:
        self.proxy = proxy

    def __call__(self, *args: Any) -> None: ...

    def __deepcopy__(self, memo: Any) -> Hook:
        return self

    def __getattr__(self, name: str) -> Any:
        TOUCHED.append(name)
        raise ImportError(f"{name} was read")


class Net(nn.Linear):
    """Has such objects among its attributes, in containers and in objects."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        vars(self)["proxy"] = proxy  # nn.Module's own __setattr__ reads it
        self.listed, self.named, self.held = [proxy, 1], {"proxy": proxy}, settings


def test_a_mirrored_module_may_hold_what_cannot_be_read(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    net = Net()
    net.register_forward_hook(Hook())
    mirrored = strategy.mirror(net)
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))
    TOUCHED.clear()  # copies are made of it

    def step(x: torch.Tensor) -> None:
        ls.compute_average_loss(mirrored(x).sum(1)).backward()
        optimizer.step()

    for number, x in enumerate(strategy.distribute_dataset(BATCHES)):
        strategy.run(step, (x,))
        net.count = number

    assert TOUCHED == []
    vars(net)["proxy"] = Proxy()  # another, which all copies get
    net.listed.append(Proxy())
    strategy.run(step, (x,))
    assert all(copy.proxy is net.proxy and copy.listed[2] is net.listed[2] for copy in mirrored.copies)
