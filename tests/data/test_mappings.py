"""A batch that is a mapping of another type than dict is of that type in each replica too."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import DataError

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

X, Y = torch.arange(35.0).reshape(7, 5).sin(), torch.arange(7) % 3


class Attributes(dict[str, Any]):
    """A dict with attributes."""

    __getattr__ = dict.__getitem__


class Wrapped(UserDict[str, Any]):
    """As transformers' BatchEncoding and Detectron's samples are made."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]

    def rows(self) -> int:
        return len(self.x)


class Fields(dict[str, Any]):
    """Takes no dict."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x=x, y=y)


class Forgetful(dict[str, Any]):
    """Takes a dict, and has other keys."""

    def __init__(self, items: Any) -> None:
        super().__init__(x=items["x"])


def factory(items: dict[str, Any]) -> defaultdict[str, Any]:
    return defaultdict(list, items)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("make", [Attributes, Wrapped])
def test_a_loop_reads_attributes(make_strategy: MakeStrategy, make: Callable[..., Any], replicas: int):
    strategy = make_strategy(replicas)

    def step(batch: Any) -> Tensor:
        assert type(batch) is make
        return ls.compute_average_loss(F.cross_entropy(batch.x[:, :3], batch.y, reduction="none"))

    for rows in (7, 2):  # of 2 rows the third replica gets none
        (batch,) = strategy.distribute_dataset([make({"x": X[:rows], "y": Y[:rows]})])
        assert sum(len(value) for value in batch["x"]) == rows
        loss = strategy.reduce("sum", strategy.run(step, (batch,)))
        torch.testing.assert_close(loss, F.cross_entropy(X[:rows, :3], Y[:rows]))


@pytest.mark.parametrize("make", [OrderedDict, factory, Wrapped])
def test_it_may_stand_in_other_structures(make_strategy: MakeStrategy, make: Callable[..., Any]):
    strategy, kind = make_strategy(2), type(make({}))

    def step(batch: Any) -> int:
        inner = batch[0]["inner"]
        assert type(inner) is kind
        if isinstance(inner, defaultdict):
            assert inner["none"] == []
        return len(inner["x"]) + len(batch[1])

    (batch,) = strategy.distribute_dataset([({"inner": make({"x": X})}, Attributes({"a": Y}))])

    assert strategy.run(step, (batch,)).values == (5, 4)


@pytest.mark.parametrize("kind", [Fields, Forgetful])
def test_a_type_that_cannot_be_made_is_named(make_strategy: MakeStrategy, kind: type):
    batch = Fields(X, Y) if kind is Fields else Attributes({"x": X, "y": Y})
    batch.__class__ = kind

    with pytest.raises(DataError, match=rf"is a {kind.__name__}.*dict\(batch\)"):
        next(iter(make_strategy(2).distribute_dataset([batch])))


def test_fit_calls_the_module_with_its_items(make_strategy: MakeStrategy):
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def trained(strategy: ls.Strategy, batch: Any) -> Tensor:
        torch.manual_seed(0)
        with strategy.scope():
            net = Net(5, 3)
            model = ls.Model(net)
            model.compile(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
        model.fit([batch] * 3, verbose=0)
        return net.weight.detach()

    expected = trained(make_strategy(1), ({"x": X}, Y))
    torch.testing.assert_close(trained(make_strategy(2), (Wrapped({"x": X}), Y)), expected)


def test_a_step_sees_an_empty_shard_in_it(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    (batch,) = strategy.distribute_dataset([Wrapped({"x": X[:2], "y": Y[:2]})])

    assert strategy.run(lambda batch: ls.has_rows(batch), (batch,)).values == (True, True, False)


def test_a_batch_encoding_has_its_methods(make_strategy: MakeStrategy):
    transformers = pytest.importorskip("transformers")
    strategy = make_strategy(2)

    def step(batch: Any) -> int:
        assert type(batch) is transformers.BatchEncoding
        return len(batch.to("cpu").input_ids)

    (batch,) = strategy.distribute_dataset([transformers.BatchEncoding({"input_ids": X, "labels": Y})])
    assert strategy.run(step, (batch,)).values == (4, 3)


def test_a_tensordict_has_its_rows(make_strategy: MakeStrategy):
    tensordict = pytest.importorskip("tensordict")
    strategy = make_strategy(2)

    def step(batch: Any) -> tuple[int, int]:
        assert batch["inner"].batch_size == batch.batch_size
        return len(batch), len(batch[0]["x"])

    inner = tensordict.TensorDict({"y": Y}, batch_size=[7])
    (batch,) = strategy.distribute_dataset([tensordict.TensorDict({"x": X, "inner": inner}, batch_size=[7])])
    rows, columns = strategy.run(step, (batch,))
    assert (rows.values, columns) == ((4, 3), 5)
