"""Attributes are read without running code of the class."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.introspection import attribute_of, attributes_of, is_kind


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise ImportError(name)


class Answering(metaclass=Meta):
    """Answers for everything, as a proxy does."""

    __dict__ = property(lambda self: {"name": "of another"})  # type: ignore[assignment]
    __class__ = property(lambda self: int)  # type: ignore[assignment]
    __self__ = property(lambda self: "of another")


class Slotted:
    __slots__ = ("empty", "value")

    def __init__(self) -> None:
        self.value = 3


def test_a_proxy_tells_nothing():
    proxy = Answering()
    assert not is_kind(proxy, int)
    assert attributes_of(proxy) is None
    assert attribute_of(proxy, "__self__") is None


def test_attributes_that_lie_in_memory_are_read():
    linear = nn.Linear(2, 1)

    assert attributes_of(linear) is linear.__dict__
    assert attribute_of(linear, "in_features") == 2
    assert attribute_of(linear.forward, "__self__") is linear
    assert attribute_of(nn.Linear.forward, "__code__") is nn.Linear.forward.__code__
    assert attribute_of(functools.partial(len), "func") is len
    assert attribute_of(Slotted(), "value") == 3
    assert attribute_of(Slotted(), "empty") is None
    assert attribute_of(torch, "__name__") == "torch"


@pytest.mark.parametrize("value", [3, "text", None, (1,), [1], torch.ones(1).numpy()])
def test_what_has_no_attributes_has_none(value: Any):
    assert attributes_of(value) is None


def test_a_module_that_is_imported_lazily_stays_so():
    spec = importlib.util.find_spec("wave")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind = type(module)
    assert attribute_of(module, "__self__") is None
    assert type(module) is kind
