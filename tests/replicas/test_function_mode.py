"""Random numbers in replicas: reproducible in every form, different between replicas, nobody else's disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica

ROWS = torch.linspace(-1, 1, 4 * 6 * 8).reshape(4, 6, 8)
IMAGES = torch.linspace(-1, 1, 2 * 8 * 6 * 6).reshape(2, 8, 6, 6)
VOLUMES = torch.linspace(-1, 1, 2 * 8 * 6**3).reshape(2, 8, 6, 6, 6)
RECURRENT: dict[str, Any] = {"hidden_size": 8, "num_layers": 2, "dropout": 0.5, "batch_first": True}


def made(make: Callable[[], nn.Module], *inputs: Tensor) -> Callable[[], Tensor]:
    """A module with the same weights wherever it is made, called in training."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make().train()

    def draw() -> Tensor:
        output = module(*inputs)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first

    return draw


def packed() -> Tensor:
    sequence = nn.utils.rnn.pack_padded_sequence(ROWS, torch.tensor([6, 5, 4, 2]), batch_first=True)
    return _LSTM(sequence)[0].data  # type: ignore[no-any-return]


with torch.random.fork_rng():
    torch.manual_seed(0)
    _LSTM = nn.LSTM(8, **RECURRENT)

DRAWS: dict[str, Callable[[], Tensor]] = {
    "F.dropout": lambda: F.dropout(ROWS, 0.5),
    "F.dropout in place": lambda: F.dropout(ROWS.clone(), 0.5, True, True),
    "torch.dropout": lambda: torch.dropout(ROWS, 0.5, True),
    "Dropout": made(lambda: nn.Dropout(0.5), ROWS),
    "Dropout1d": made(lambda: nn.Dropout1d(0.5), ROWS),
    "Dropout2d": made(lambda: nn.Dropout2d(0.5), IMAGES),
    "Dropout3d": made(lambda: nn.Dropout3d(0.5), IMAGES.unsqueeze(-1)),
    "AlphaDropout": made(lambda: nn.AlphaDropout(0.5), ROWS),
    "FeatureAlphaDropout": made(lambda: nn.FeatureAlphaDropout(0.5), IMAGES),
    "RReLU": made(lambda: nn.RReLU(), ROWS),
    "torch.rrelu_": lambda: torch.rrelu_(ROWS.clone(), 0.1, 0.5, True),
    "MultiheadAttention": made(lambda: nn.MultiheadAttention(8, 2, 0.5), ROWS, ROWS, ROWS),
    "TransformerEncoderLayer": made(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.3), ROWS),
    "attention": lambda: F.scaled_dot_product_attention(ROWS, ROWS, ROWS, dropout_p=0.5),
    "an operator": lambda: torch.ops.aten.bernoulli.default(torch.full((40,), 0.5)),
    "LSTM": made(lambda: nn.LSTM(8, **RECURRENT), ROWS),
    "packed LSTM": packed,
    "GRU": made(lambda: nn.GRU(8, **RECURRENT), ROWS),
    "RNN": made(lambda: nn.RNN(8, **RECURRENT), ROWS),
    "gumbel_softmax": lambda: F.gumbel_softmax(ROWS),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(IMAGES, 2, output_size=4),
    "fractional_max_pool3d": lambda: F.fractional_max_pool3d(VOLUMES, 2, output_size=4),
    "rand": lambda: torch.rand(8),
    "randn": lambda: torch.randn(2, 4, dtype=torch.float64),
    "randint": lambda: torch.randint(10**9, (8,)),
    "randperm": lambda: torch.randperm(64),
    "rand_like": lambda: torch.rand_like(ROWS),
    "randn_like": lambda: torch.randn_like(ROWS),
    "normal": lambda: torch.normal(ROWS, 1.0),
    "bernoulli": lambda: torch.bernoulli(ROWS.abs()),
    "multinomial": lambda: torch.multinomial(ROWS[0].abs() + 0.1, 4),
    "poisson": lambda: torch.poisson(ROWS.abs() * 99),
    "normal_": lambda: torch.empty(8).normal_(),
    "uniform_": lambda: torch.empty(8).uniform_(),
    "exponential_": lambda: torch.empty(8).exponential_(),
    "random_": lambda: torch.empty(8).random_(10**6),
    "init.kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(4, 4)),
    "init.xavier_normal_": lambda: nn.init.xavier_normal_(torch.empty(4, 4)),
    "init.trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(4, 4)),
    "init.orthogonal_": lambda: nn.init.orthogonal_(torch.empty(4, 4)),
    "Normal": lambda: torch.distributions.Normal(ROWS, 1.0).rsample(),
    "Categorical": lambda: torch.distributions.Categorical(torch.ones(99)).sample((8,)),
    "Gamma": lambda: torch.distributions.Gamma(ROWS.abs() + 1, 1.0).rsample(),
    "Beta": lambda: torch.distributions.Beta(ROWS.abs() + 1, 1.0).rsample(),
    "Dirichlet": lambda: torch.distributions.Dirichlet(ROWS.abs() + 1).rsample(),
    "Binomial": lambda: torch.distributions.Binomial(100, ROWS.abs()).sample(),
    "Poisson": lambda: torch.distributions.Poisson(ROWS.abs() * 99).sample(),
    "Bernoulli": lambda: torch.distributions.Bernoulli(ROWS.abs()).sample(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_repeat_with_the_seed_differ_between_replicas_and_disturb_nobody(name: str, make_strategy: MakeStrategy):
    draw = DRAWS[name]
    default = torch.get_rng_state()
    with torch.no_grad():
        runs = []
        for seed in (7, 7, 8):
            strategy = make_strategy(3, seed=seed)
            runs.append([*strategy.run(draw), *strategy.run(draw)])
    first, again, other = runs

    assert all(map(torch.equal, first, again))
    assert not any(torch.equal(a, b) for position, a in enumerate(first) for b in first[:position])
    assert not any(map(torch.equal, first, other))
    assert torch.equal(torch.get_rng_state(), default)


def test_without_a_seed_it_is_torch_s_seed(make_strategy: MakeStrategy):
    draws = []
    with torch.random.fork_rng():
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            draws.append(make_strategy(1, seed=None).run(lambda: torch.rand(4)))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_a_generator_of_the_user_s_own_is_used(make_strategy: MakeStrategy):
    def draw() -> Tensor:
        return torch.rand(4, generator=torch.Generator().manual_seed(5))

    assert all(torch.equal(value, draw()) for value in make_strategy(2).run(draw))


def test_in_a_merge_call_it_does_not_matter_who_came_last(make_strategy: MakeStrategy):
    """What runs once for all replicas draws from torch's default generator, in the order of the program."""

    def step() -> tuple[Tensor, Tensor]:
        context = here()
        merged = context.merge_call(lambda _strategy: torch.rand(4))
        return merged, torch.rand(4)

    runs = []
    with torch.random.fork_rng():
        for _ in range(4):
            torch.manual_seed(1)
            strategy = make_strategy(4, seed=0)
            runs.append([strategy.run(step) for _ in range(5)])

    for run in runs[1:]:
        for (merged, own), (first_merged, first_own) in zip(run, runs[0], strict=True):
            assert torch.equal(merged, first_merged)
            assert all(map(torch.equal, own, first_own))


def test_recurrent_layers_without_dropout_do_not_wait_for_the_generator(
    make_strategy: MakeStrategy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lockstep.replicas.rng.function_mode.DEFAULT_GENERATOR_LOCK", None)
    strategy = make_strategy(2)
    trained, evaluated, single = nn.LSTM(8, **RECURRENT), nn.LSTM(8, **RECURRENT).eval(), nn.GRU(8, 8)
    assert isinstance(strategy.run(lambda: single(ROWS)[0]), PerReplica)
    assert isinstance(strategy.run(lambda: evaluated(ROWS)[0]), PerReplica)
    with pytest.raises(TypeError, match="NoneType"):
        strategy.run(lambda: trained(ROWS)[0])


def test_the_weights_of_an_l1_loss_are_not_lost(make_strategy: MakeStrategy):
    weight = ROWS.square()

    def step() -> Tensor:
        return F.l1_loss(ROWS, ROWS + 1.5 * weight, weight=weight)

    for value in make_strategy(2).local_results(make_strategy(2).run(step)):
        torch.testing.assert_close(value, step())
