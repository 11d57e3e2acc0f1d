"""Loops over ``strategy.run`` that train Keras models, beside the loop of Keras's guide on one device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy

keras = pytest.importorskip("keras")

from tests.integrations.programs import keras_models as KERAS  # noqa: E402

import lockstep as ls  # noqa: E402
from lockstep._torch_compat import optimizer_pre_hooks  # noqa: E402
from lockstep.errors import ConfigError, UsageError  # noqa: E402
from lockstep.integrations.keras import distribute  # noqa: E402

layers = keras.layers
EXACT = 1e-6
# The last batch has 2 rows: three replicas have one without rows.
BATCHES = KERAS.LOOP_BATCHES


@pytest.mark.parametrize("optimizer", list(KERAS.LOOP_OPTIMIZERS))
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_loop_has_the_numbers_of_one_device(optimizer: str, replicas: int, make_strategy: MakeStrategy):
    expected = KERAS.train_in_loop(optimizer, None)
    found = KERAS.train_in_loop(optimizer, make_strategy(replicas))
    for kind in ("seen", "weights", "state"):
        assert KERAS.largest_difference(found[kind], expected[kind]) < 20 * EXACT


def test_two_models_with_an_optimizer_each_in_one_step(make_strategy: MakeStrategy):
    found = []
    for strategy in (None, make_strategy(3)):
        keras.utils.set_random_seed(1)
        maker = keras.Sequential([keras.Input((4,)), layers.Dense(5)])
        judge = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
        optimizers = [keras.optimizers.Adam(0.1, name=name) for name in ("maker", "judge")]
        for model in (maker, judge) if strategy is not None else ():
            distribute(model, strategy)

        def step(
            x: Any, rows: int, models: Any = (maker, judge), optimizers: Any = optimizers, judge: Any = judge
        ) -> None:
            for model, optimizer, sign in zip(models, optimizers, (1, -1), strict=True):
                loss = ls.compute_average_loss(sign * judge(models[0](x))[:, 0] ** 2, global_batch_size=rows)
                models[0].zero_grad()
                models[1].zero_grad()
                loss.backward()
                optimizer.apply([each.value.grad for each in model.trainable_weights], model.trainable_weights)

        for x in (torch.from_numpy(KERAS.IMAGES[:5, 0, 0, :1]).repeat(1, 4), torch.ones(2, 4)):
            if strategy is None:
                step(x, len(x))
            else:
                (shards,) = strategy.distribute_dataset([x])
                strategy.run(step, args=(shards, len(x)))
        found.append([*maker.get_weights(), *judge.get_weights()])

    assert KERAS.largest_difference(found[1], found[0]) < EXACT


def test_a_loop_and_fit_go_on_from_each_other_and_a_rerun_with_dropout_has_the_same_bits(make_strategy: MakeStrategy):
    runs, masks = [], []

    def noted(x: Any) -> Any:
        masks.append(x.detach() == 0)
        return x

    for _ in range(2):
        keras.utils.set_random_seed(1)
        strategy = make_strategy(2)
        inner = [layers.Flatten(), layers.Dropout(0.5), layers.Lambda(noted), layers.Dense(3)]
        model = distribute(keras.Sequential([keras.Input((10, 10, 3)), *inner]), strategy)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def step(x: Any, y: Any, model: Any = model, loss: Any = loss) -> None:
            loss(y, model(x, training=True)).backward()
            weights = model.trainable_weights
            model.optimizer.apply([each.value.grad for each in weights], weights)

        model.fit(KERAS.IMAGES, KERAS.LABELS, batch_size=16, verbose=0)
        masks.clear()
        for batch in strategy.distribute_dataset(BATCHES[:2]):
            strategy.run(step, args=batch)
        drawn = list(masks)
        model.fit(KERAS.IMAGES, KERAS.LABELS, batch_size=16, verbose=0)
        assert int(model.optimizer.iterations) == 5 + 2 + 5
        runs.append(model.get_weights())

    assert KERAS.largest_difference(*runs) == 0.0
    assert len(drawn) == 4
    assert not any(torch.equal(drawn[i], drawn[j]) for i in range(4) for j in range(i))


def test_replicas_without_rows_leave_statistics_alone_and_count_what_they_count(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    model = distribute(keras.Sequential([keras.Input((2,)), layers.BatchNormalization(momentum=0.0)]), strategy)
    calls = keras.Variable(0.0, trainable=False, aggregation="sum")

    def step(x: Any) -> None:
        model(x, training=True)
        calls.assign_add(1.0)

    (shards,) = strategy.distribute_dataset([torch.tensor([[1.0, 5.0]])])
    strategy.run(step, args=(shards,))

    assert model.layers[0].moving_mean.numpy().tolist() == [1.0, 5.0]
    assert float(calls.value) == 3.0


def test_metrics_count_all_rows_and_merge_calls_have_the_variables_themselves(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    model = distribute(keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)]), strategy)
    mean, steps = keras.metrics.Mean(), keras.Variable(0, trainable=False, aggregation="only_first_replica")
    weight = model.trainable_weights[0]

    def step(x: Any) -> None:
        mean.update_state(x[:, 0])
        steps.assign_add(1)
        ls.get_replica_context().merge_call(lambda _: weight.assign(2.0 * keras.ops.ones_like(weight)))

    for rows in (7, 2):
        (shards,) = strategy.distribute_dataset([torch.arange(rows, dtype=torch.float32)[:, None].repeat(1, 2)])
        strategy.run(step, args=(shards,))

    assert float(mean.result()) == pytest.approx((21 + 1) / 9)
    assert int(steps.value) == 2
    assert model.get_weights()[0].tolist() == [[2.0], [2.0]]


def mean_loss(model: Any, x: Any, y: Any) -> None:
    keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, model(x))


def assigned_weight(model: Any, x: Any, y: Any) -> None:
    model(x)
    model.trainable_weights[0].assign(model.trainable_weights[0] * 0.9)


def torch_optimizer(model: Any, x: Any, y: Any) -> None:
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize(
    ("step", "error", "named"),
    [
        (mean_loss, ConfigError, "sum_over_batch_size"),
        (assigned_weight, UsageError, "sequential.*/kernel"),
        (torch_optimizer, UsageError, "SGD.step"),
    ],
)
def test_what_would_give_other_numbers_is_refused_in_one_line(
    step: Any, error: type[Exception], named: str, make_strategy: MakeStrategy
):
    strategy = make_strategy(2)
    model = distribute(keras.Sequential([keras.Input((10, 10, 3)), layers.Flatten(), layers.Dense(3)]), strategy)
    before, hooks = model.get_weights(), dict(optimizer_pre_hooks)
    (shards,) = strategy.distribute_dataset(BATCHES[:1])

    with pytest.raises(error, match=named) as refused:
        strategy.run(step, args=(model, *shards))

    assert "\n" not in str(refused.value)
    assert KERAS.largest_difference(model.get_weights(), before) == 0.0
    assert optimizer_pre_hooks == hooks  # one more would keep every mirrored optimizer from fused kernels


def test_a_batch_that_was_not_divided_is_warned_of(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    model = distribute(keras.Sequential([keras.Input((10, 10, 3)), layers.Flatten(), layers.Dense(3)]), strategy)
    with pytest.warns(UserWarning, match="distribute_dataset"):
        strategy.run(lambda x: model(x).sum(), args=(BATCHES[0][0],))


def test_a_strategy_ends_with_its_models(split_cpu: Callable[[int], tuple[Any, ...]]):
    strategy = ls.MirroredStrategy(split_cpu(2))
    model = distribute(keras.Sequential([keras.Input((8,)), layers.Dense(3)]), strategy)
    model.compile("sgd", "mse")
    model.fit(KERAS.X[:4], KERAS.X[:4, :3], verbose=0)
    known = weakref.ref(strategy)
    del strategy, model
    gc.collect()
    assert known() is None


def test_a_model_of_no_strategy_or_another_one_is_refused(make_strategy: MakeStrategy):
    one, other = make_strategy(2), make_strategy(3)
    model = keras.Sequential([keras.Input((10, 10, 3)), layers.Flatten(), layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)

    def step(x: Any, y: Any) -> None:
        gradients = torch.autograd.grad(model(x).sum(), [each.value for each in model.trainable_weights])
        optimizer.apply(gradients, model.trainable_weights)

    with pytest.raises(UsageError, match="distribute"):
        one.run(step, args=next(iter(one.distribute_dataset(BATCHES))))
    distribute(model, other)
    with pytest.raises(UsageError, match="another strategy"):
        one.run(step, args=next(iter(one.distribute_dataset(BATCHES))))
