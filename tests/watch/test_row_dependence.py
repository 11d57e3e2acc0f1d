"""Rows are followed through a step: what combines them is refused by fit and told of in loops, what does not is not.

Every operation stands between two layers of a module that a hand-written loop on one device trains too.
"""

from __future__ import annotations

import copy
import cProfile
import pstats
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.strategies.mirrored import MirroredStrategy

    MakeStrategy = Callable[..., MirroredStrategy]

Between = Callable[["Net", Tensor], Tensor]

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 8, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (24,), generator=GENERATOR)
BATCHES = [(X[:12], Y[:12]), (X[12:], Y[12:])]


class Net(nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.between, self.calls = between, 0
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.lstm, self.gru, self.attention = nn.LSTM(8, 8), nn.GRU(8, 8), nn.MultiheadAttention(8, 2, dropout=0.1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)  # its dropout is 0.1
        self.norm, self.conv = nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3, padding=1)
        self.register_buffer("memory", torch.zeros(8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.last(self.between(self, self.first(x)))
        return out


def of_halves(_: Net, h: Tensor) -> Tensor:
    one, other = h.chunk(2)
    return torch.cat([one * other.tanh(), other])


def filled(_: Net, h: Tensor) -> Tensor:
    moved = torch.zeros_like(h)
    moved[0], moved[1:] = h[-1], h[:-1]
    return h * moved


def of_neighbours(_: Net, h: Tensor) -> Tensor:
    return torch.stack([h[row] * h[row - 1] for row in range(len(h))])


def sorted_by_length(net: Net, h: Tensor, *, enforce_sorted: bool) -> Tensor:
    lengths = (h[:, 0] > 0).long() + 1
    order = lengths.argsort(descending=True)
    h, lengths = (h[order], lengths[order]) if enforce_sorted else (h, lengths)
    packed = pack_padded_sequence(
        torch.stack([h, h.tanh()], 1), lengths.tolist() if enforce_sorted else lengths, True, enforce_sorted
    )
    last = pad_packed_sequence(net.lstm(packed)[0], batch_first=True, total_length=2)[0].sum(1)
    return last[order.argsort()] if enforce_sorted else last


def of_experts(h: Tensor) -> Tensor:
    expert, out = (h[:, 0] > 0).long(), torch.zeros_like(h)
    for number in expert.unique().tolist():
        rows = (expert == number).nonzero()[:, 0]
        out[rows] = h[rows] * (number + 1)
    return out


MIXING: dict[str, Between] = {
    "an LSTM over rows": lambda net, h: net.lstm(h[:, None])[0][:, 0],
    "a GRU over rows": lambda net, h: net.gru(h)[0],
    "attention over rows": lambda net, h: net.attention(h, h, h)[0],
    "a transformer's layer over rows": lambda net, h: net.layer(h[:, None])[:, 0],
    "attention by hand": lambda _, h: (h @ h.T).softmax(-1) @ h,
    "attention of a function": lambda _, h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "a convolution over rows": lambda net, h: net.conv(h.T[None])[0].T,
    "two views": of_halves,
    "roll": lambda _, h: h * h.roll(1, 0),
    "flip": lambda _, h: h * h.flip(0),
    "indexing": lambda _, h: h - h[:1].tanh(),
    "gather": lambda _, h: h * h.gather(0, torch.arange(len(h)).flip(0)[:, None].expand_as(h)),
    "writing": filled,
    "a loop over rows": of_neighbours,
    "cumsum": lambda _, h: h.cumsum(0).tanh(),
    "diff": lambda _, h: torch.cat([h[:1], h.diff(dim=0)]).tanh(),
    "cdist": lambda _, h: h * torch.cdist(h, h).sum(1, keepdim=True),
    "einsum": lambda _, h: torch.einsum("nd,md->nm", h, h) @ h,
    "mean": lambda _, h: h - h.mean(0),
    "detached statistics": lambda _, h: (h - h.detach().mean(0)) / (h.detach().std(0) + 0.1),
    "largest": lambda _, h: h - h.max(0).values,
    "norm": lambda _, h: h / h.norm(dim=0),
    "softmax": lambda _, h: h.softmax(0),
    "sort": lambda _, h: h * h.sort(0).values,
    "median": lambda _, h: h * (h > h.median(0).values),
    "layer norm of all": lambda _, h: F.layer_norm(h, h.shape),
}
APART: dict[str, Between] = {
    "nothing": lambda _, h: h.tanh(),
    "batch norm, whose statistics may be a shard's": lambda net, h: net.norm(h).relu(),
    "dropout": lambda _, h: F.dropout(h, 0.5),
    "noise": lambda _, h: h + torch.randn_like(h) * torch.rand(len(h), 1),
    "transposed": lambda _, h: h.T.tanh().T,
    "an LSTM along rows": lambda net, h: net.lstm(h[None])[0][0],
    "a transformer's layer along rows": lambda net, h: net.layer(h[None])[0],
    "there and back": lambda _, h: h.flip(0).tanh().flip(0),
    "a loop over rows": lambda _, h: torch.stack([row.tanh() for row in h]),
    "in place": lambda _, h: h.clone().mul_(2).relu_(),
    "a buffer": lambda net, h: h - net.memory,
    "checkpointed": lambda _, h: checkpoint(lambda z: z.tanh() * 2, h, use_reentrant=False),  # type: ignore[no-any-return]
    "vmap": lambda _, h: torch.vmap(torch.tanh)(h),
    "sorted along rows": lambda _, h: h.sort(1).values,
    "statistics that are not used": lambda _, h: (h.detach().mean(0), h)[1],
    "NumPy": lambda _, h: h * torch.from_numpy(abs(h.detach().numpy())),
    "group norm": lambda _, h: F.group_norm(h, 2),
    "sorted by length": lambda net, h: sorted_by_length(net, h, enforce_sorted=True),
    "packed in any order": lambda net, h: sorted_by_length(net, h, enforce_sorted=False),
    "experts": lambda _, h: of_experts(h),
    "a sampler that rejects": lambda _, h: torch.distributions.Gamma(h.abs() + 0.1, 1.0).rsample(),
    "an operator that draws": lambda _, h: h * torch.ops.aten.rand_like(h),
}


def fitted(strategy: MirroredStrategy, between: Between, **settings: Any) -> nn.Module:
    with strategy.scope():
        module = Net(between)
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), 0.1), nn.CrossEntropyLoss(), **settings)
    model.fit(BATCHES, epochs=2, verbose=0)
    return module


def looped(strategy: MirroredStrategy, between: Between) -> list[str]:
    """Trains by a loop of its own; gives what was warned of there."""
    mirrored = strategy.mirror(Net(between))
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))

    def step(x: Tensor, y: Tensor) -> None:
        ls.compute_average_loss(F.cross_entropy(mirrored(x), y, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in strategy.distribute_dataset(BATCHES):
            strategy.run(step, batch)
    return [str(each.message) for each in caught if each.filename == __file__]


@pytest.mark.parametrize("name", MIXING)
def test_a_module_that_combines_rows_is_refused_by_fit(make_strategy: MakeStrategy, name: str):
    with pytest.raises(
        ConfigError, match=r"combines the rows of its shard \(.*test_row_dependence.py:\d+.*batch_first"
    ):
        fitted(make_strategy(2), MIXING[name])


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_step_that_combines_rows_is_told_of_in_a_loop(make_strategy: MakeStrategy, name: str, replicas: int):
    (told,) = looped(make_strategy(replicas), MIXING[name])

    assert "combines the rows" in told
    assert "gather_rows" in told


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", APART)
def test_what_keeps_rows_apart_is_neither_refused_nor_told_of(make_strategy: MakeStrategy, name: str):
    fitted(make_strategy(2), APART[name])

    assert looped(make_strategy(3), APART[name]) == []


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("name", ["an LSTM over rows", "mean", "indexing"])
def test_evaluate_and_predict_refuse_it_too(make_strategy: MakeStrategy, method: str, name: str):
    with make_strategy(2).scope():
        model = ls.Model(Net(MIXING[name]))
        model.compile(loss=nn.CrossEntropyLoss())

    for _ in range(2):  # a refusal is no check that has passed
        with pytest.raises(ConfigError, match=r"the module.* combines the rows of its shard"):
            getattr(model, method)(BATCHES)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["batch norm, whose statistics may be a shard's", "group norm", "transposed"])
def test_evaluate_and_predict_take_what_keeps_rows_apart(make_strategy: MakeStrategy, name: str):
    with make_strategy(3).scope():
        model = ls.Model(Net(APART[name]))
        model.compile(loss=nn.CrossEntropyLoss())
    alone = Net(APART[name]).eval()

    assert torch.allclose(model.predict(BATCHES), alone(X))
    model.evaluate(BATCHES)


@pytest.mark.filterwarnings("error")
def test_rows_may_be_combined_on_purpose(make_strategy: MakeStrategy):
    fitted(make_strategy(2), MIXING["mean"], combines_rows=True)


def test_a_random_order_of_rows_is_told_of_and_not_refused(make_strategy: MakeStrategy):
    def mixup(_: Net, h: Tensor) -> Tensor:
        return 0.7 * h + 0.3 * h[torch.randperm(len(h))].tanh()

    with pytest.warns(UserWarning, match="combines the rows of its shard"):
        fitted(make_strategy(2), mixup)


@pytest.mark.parametrize("first", [2, 3, 5, 8, 16])
def test_rows_that_are_combined_from_a_later_step_on_are_noticed_then(make_strategy: MakeStrategy, first: int):
    """As by a factor that warms up, a class that is rare, or data that are sorted."""
    strategy, steps = make_strategy(2), [0]
    with strategy.scope():
        module = nn.Linear(8, 3).double()
        model = ls.Model(module)

        def loss(outputs: Tensor, y: Tensor) -> Tensor:
            weight = (y == 0).sum() / (y == 2).sum().clamp(min=1) if steps[0] >= first else torch.ones(())
            return F.cross_entropy(outputs, y, torch.stack([torch.ones(()), torch.ones(()), weight]).double())

        model.compile(torch.optim.SGD(module.parameters(), 0.1), loss)

    class Count(ls.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            steps[0] = batch + 1

    with pytest.raises(ConfigError, match="rows"):
        model.fit(BATCHES * 8, verbose=0, callbacks=[Count()])
    assert steps[0] == first


def test_a_step_whose_loss_is_zero_leaves_the_check_to_the_next(make_strategy: MakeStrategy):
    """An event in step 19 alone, where powers of two have seen none."""
    strategy, steps = make_strategy(2), [0]
    with strategy.scope():
        module = nn.Linear(8, 1).double()
        model = ls.Model(module)

        def loss(risk: Tensor, y: Tensor) -> Tensor:
            return ((risk[:, 0] - risk[:, 0].logsumexp(0)) * (steps[0] == 19)).sum()[None].expand(len(y))

        model.compile(torch.optim.SGD(module.parameters(), 0.1), loss)

    class Count(ls.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            steps[0] = batch + 1

    with pytest.raises(ConfigError, match="rows"):
        model.fit(BATCHES * 12, verbose=0, callbacks=[Count()])
    assert steps[0] == 19


def test_shards_of_one_row_leave_the_check_to_a_later_step(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    with strategy.scope():
        module = Net(MIXING["mean"])
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), 0.1), nn.CrossEntropyLoss())

    with pytest.raises(ConfigError, match="combines the rows"):
        model.fit([(X[:2], Y[:2])] * 20 + BATCHES, verbose=0)


def test_following_rows_calls_nothing_of_the_user_twice_and_changes_no_bit(
    make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
):
    def between(net: Net, h: Tensor) -> Tensor:
        net.memory.mul_(0.9).add_(h.detach().mean().abs())
        return F.dropout(net.layer(net.norm(h)[None])[0] + torch.randn_like(h) * 0.1, 0.3)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*changes the buffer 'memory'")
        followed = fitted(make_strategy(2, seed=3), between)
        monkeypatch.setattr("lockstep.watch.check_choice.is_due", lambda *_, **__: False)
        plain = fitted(make_strategy(2, seed=3), between)

    assert followed.calls == plain.calls == 4
    for name, value in plain.state_dict().items():
        assert torch.equal(followed.state_dict()[name], value), name


def test_a_layer_of_zeros_does_not_hide_what_comes_before_it(make_strategy: MakeStrategy):
    with make_strategy(2).scope():
        module = Net(MIXING["mean"])
        nn.init.zeros_(module.last.weight)
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), 2.0), nn.CrossEntropyLoss())

    with pytest.raises(ConfigError, match="combines the rows"):
        model.fit(BATCHES, verbose=0)


def test_functions_of_the_program_are_called_once(make_strategy: MakeStrategy):
    calls: list[int] = []

    def distance(one: Tensor, other: Tensor) -> Tensor:
        calls.append(1)
        return (one - other).square().sum(-1)

    def between(_: Net, h: Tensor) -> Tensor:
        away = F.triplet_margin_with_distance_loss(h, h + 1, h * h, distance_function=distance, reduction="none")
        return h + away[:, None]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*changes 'calls'")
        fitted(make_strategy(2), between)
    assert len(calls) == 2 * 2 * 4  # distances of a shard; replicas; steps


def test_outputs_that_are_no_rows_are_not_taken_for_rows(make_strategy: MakeStrategy):
    """The states of two layers beside two rows a shard, in the steps that do not follow the module."""

    def between(net: Net, h: Tensor) -> Tensor:
        states = net.gru(h[:1])[1].expand(2, 8)
        net.kept = states
        return h

    strategy = make_strategy(2)
    mirrored = strategy.mirror(Net(between))

    def step(x: Tensor, y: Tensor) -> None:
        ls.compute_average_loss(F.cross_entropy(mirrored(x), y, reduction="none")).backward()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*combines the rows")
        for batch in strategy.distribute_dataset([(X[:4], Y[:4])] * 6):
            strategy.run(step, batch)


def test_a_loop_whose_outputs_are_ever_smaller_is_judged_by_its_terms(make_strategy: MakeStrategy):
    """Losses that cancel out, as advantages with a mean of 0 do, are no sign of rows that are combined."""
    strategy = make_strategy(2)
    mirrored = strategy.mirror(copy.deepcopy(nn.Linear(8, 1)))
    batch = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))

    def step(x: Tensor) -> None:
        scores = mirrored(x)[:, 0]
        (scores - scores.detach() + 1e3 * (x[:, 0] - x[:, 0])).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in strategy.distribute_dataset([batch]):
            strategy.run(step, (x,))


@pytest.mark.parametrize("kind", ["python", "c"])
def test_a_profiler_in_a_step_sees_the_step_and_works_on(make_strategy: MakeStrategy, kind: str) -> None:
    seen: list[set[str]] = []

    def profiled(x: Tensor) -> None:
        names: set[str] = set()
        if kind == "c":
            profiler = cProfile.Profile()
            profiler.runcall(shifted, x)
            names = {name for _, _, name in pstats.Stats(profiler).stats}  # type: ignore[attr-defined]
        else:
            before = sys.getprofile()
            sys.setprofile(lambda frame, *_: names.add(frame.f_code.co_name))
            shifted(x)
            sys.setprofile(before)
        seen.append(names)

    def shifted(x: Tensor) -> None:
        F.gelu(torch.tanh(x) + 1)
        after(x)

    def after(x: Tensor) -> None:
        x.sum()

    strategy = make_strategy(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in strategy.distribute_dataset([X] * 2):
            strategy.run(profiled, (batch,))
    assert len(seen) == 4
    assert all({"shifted", "after"} <= names for names in seen)
    assert kind == "c" or not any("_follow" in names for names in seen)
