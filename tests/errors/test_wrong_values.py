"""Values of the wrong type or size, all over the public API: each is told in one line that shows what was received."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.errors import ConfigError, LockstepError


class Shy:
    """Has no spelling."""

    def __repr__(self) -> str:
        raise RuntimeError("no spelling")


THING, SHY = object(), Shy()
NO_NUMBERS = ("3", b"3", [3], {}, THING)
NO_COUNTS = (*NO_NUMBERS, SHY, True, 1.5, -1, math.nan)
NO_SIZES = (*NO_COUNTS, 0)
NO_TIMES = (*NO_NUMBERS, SHY, True, 0, -1.0, math.nan, math.inf, 10**30)
NO_PATHS = (3, 1.5, b"here", [], THING, "", " ", "a\0b", "n" * 300, "\udcff\ud800")
NO_FUNCTIONS = (3, "step", [], THING)
NO_TEXTS = (3, 1.5, b"text", [], {}, THING)
NO_SEEDS = (*NO_NUMBERS, SHY, True, 1.5, math.nan)
HUGE = (10**6, 10**30)

# Code with a value V -> what no V may be.
WRONG: dict[str, tuple[Any, ...]] = {
    "ls.MirroredStrategy(V)": (
        3,
        1.5,
        THING,
        {},
        [],
        [None],
        [3],
        "cpu:0",
        "",
        b"cpu:0",
        ["cpu:x"],
        [""],
        ["cpu:0", "cpu:0"],
        ["cpu:" + "9" * 30],
    ),
    "ls.MirroredStrategy(['cpu:0'], replicas=V)": (*NO_SIZES, *HUGE),
    "ls.MirroredStrategy(['cpu:0'], threads_per_replica=V)": (*NO_SIZES, *HUGE),
    "ls.MirroredStrategy(['cpu:0'], seed=V)": NO_SEEDS,
    "ls.MirroredStrategy(['cpu:0'], timeout_s=V)": NO_TIMES,
    "ls.MultiWorkerMirroredStrategy(['cpu:0'], cluster=V)": (3, "hosta:2000", ["hosta:2000"], {}, THING),
    "ls.MultiWorkerMirroredStrategy(['cpu:0'], cluster=cluster, communication=V)": (3, "ring", {}, THING),
    "ls.MultiWorkerMirroredStrategy(['cpu:0'], cluster=cluster, timeout_s=V)": NO_TIMES,
    "ls.MultiWorkerMirroredStrategy(['cpu:0'], cluster=cluster, seed=V)": NO_SEEDS,
    "ls.ParallelStrategy(cluster=cluster, data=V)": (*NO_NUMBERS, True, 1.5, -2, 0, *HUGE),
    "ls.ParallelStrategy(cluster=cluster, tensor=V)": (*NO_SIZES, *HUGE),
    "ls.ParallelStrategy(cluster=cluster, pipeline=V)": (*NO_SIZES, *HUGE),
    "ls.ParallelStrategy(cluster=cluster, microbatches=V)": NO_SIZES,
    "ls.ParallelStrategy(cluster=cluster, schedule=V)": NO_TEXTS,
    "ls.ParallelStrategy(cluster=cluster, communication=V)": (3, "ring", {}, THING),
    "ls.CommunicationOptions(bucket_mb=V)": (*NO_NUMBERS, 0, -1, math.nan),
    "ls.CommunicationOptions(compression=V)": NO_TEXTS,
    "ls.CommunicationOptions(lost_after_s=V)": NO_TIMES,
    "ls.CommunicationOptions(timeout_s=V)": NO_TIMES,
    "ls.ClusterSpec(workers=V, index=0)": (
        3,
        "hosta:2000",
        b"hosta:2000",
        [3],
        [None],
        [b"a:1"],
        ["hosta"],
        ["255.255.255.255:2000"],
        ["a\udcff:1"],
        {},
        [],
    ),
    "ls.ClusterSpec(workers=['hosta:2000'], index=V)": (*NO_COUNTS, 10**30),
    "ls.ClusterSpec(workers=['hosta:2000'], index=0, task=V)": NO_TEXTS,
    "ls.ClusterSpec(workers=['hosta:2000'], index=0, job_id=V)": NO_TEXTS,
    "ls.ClusterSpec(workers=['hosta:2000'], index=0, attempt=V)": NO_COUNTS,
    "ls.InputContext(num_input_pipelines=V)": NO_SIZES,
    "ls.InputContext(input_pipeline_id=V)": NO_COUNTS,
    "ls.InputContext().get_per_replica_batch_size(V)": NO_SIZES,
    "ls.config.list_physical_devices(V)": (*NO_TEXTS, "", "TPU"),
    "ls.config.set_logical_device_configuration(V, [])": (3, "CPU", THING, []),
    "ls.config.set_logical_device_configuration(cpu, V)": (3, "2", THING, [3], [None]),
    "ls.config.get_logical_device_configuration(V)": (3, "CPU", THING),
    "ls.config.LogicalDeviceConfiguration(memory_limit=V)": NO_SIZES,
    "ls.PerReplica(V)": (3, 1.5, THING, []),
    "strategy.reduce(V, torch.ones(2))": (*NO_TEXTS, "product"),
    "strategy.reduce('sum', V)": ("three", THING, [THING], b"3"),
    "strategy.reduce('sum', torch.ones(2), axis=V)": (*NO_NUMBERS, True, 1.5, 7, -9),
    "strategy.gather(V, 0)": (3, "three", THING, None),
    "strategy.gather(torch.ones(2), V)": (*NO_NUMBERS, True, 1.5, None, 7),
    "strategy.mirror(torch.nn.Linear(2, 1), memory_format=V)": NO_TEXTS,
    "strategy.variable(V)": ("three", THING, None, {}, [THING], b"3"),
    "strategy.variable(1.0, aggregation=V)": NO_TEXTS,
    "strategy.variable(1.0, synchronization=V)": NO_TEXTS,
    "variable.assign(V)": ("three", THING, None, {}, torch.ones(7)),
    "variable.assign_add(V)": ("three", THING, None, {}, torch.ones(7)),
    "strategy.distribute_dataset(V)": (3, None, THING),
    "strategy.distribute_dataset(batches, prefetch=V)": NO_COUNTS,
    "strategy.distribute_dataset(batches, shard=V)": NO_TEXTS,
    "strategy.distribute_dataset(batches, lists=V)": NO_TEXTS,
    "strategy.distribute_datasets_from_function(V)": (*NO_FUNCTIONS, None),
    "ls.compute_average_loss(V, global_batch_size=2)": (3, "loss", None, [], THING, torch.ones(())),
    "ls.compute_average_loss(torch.ones(2), sample_weight=V, global_batch_size=2)": (
        3,
        "weight",
        [],
        THING,
        torch.ones(7),
    ),
    "ls.compute_average_loss(torch.ones(2), global_batch_size=V)": (*NO_SIZES, 10**30),
    "run(lambda: ls.get_replica_context().all_gather(V, 0))": ("three", b"3", THING, None),
    "run(lambda: ls.scale_regularization_loss(V))": ("loss", None, [], THING),
    "ls.Model(V)": (3, "model", None, [], THING, torch.nn.Linear),
    "new().compile(optimizer=V, loss=loss)": (3, "descent", [], THING),
    "new().compile(optimizer=sgd, loss=V)": (3, "anger", [], THING, None, torch.nn.MSELoss),
    "new().compile(optimizer=sgd, loss=loss, metrics=V)": (3, "taste", ["taste"], THING, {"accuracy": 3}, {3: THING}),
    "new().compile(optimizer=sgd, loss=loss, scheduler=V)": (3, "cosine", [], THING),
    "new().compile(optimizer=sgd, loss=loss, precision=V)": NO_TEXTS,
    "new().compile(optimizer=sgd, loss=loss, accumulate=V)": NO_SIZES,
    "new().compile(optimizer=sgd, loss=loss, clip_norm=V)": (*NO_NUMBERS, True, 0, -1, math.nan),
    "new().compile(optimizer=sgd, loss=loss, graphs=V)": (3, "yes", None, THING),
    "model.fit(V, verbose=0)": (3, "data", None, THING, [], {}, [3], ["ab"], [None]),
    "model.fit(x, V, verbose=0)": (3, "labels", THING, None, torch.ones(3, 1)),
    "model.fit(batches, epochs=V, verbose=0)": NO_SIZES,
    "model.fit(batches, initial_epoch=V, verbose=0)": NO_COUNTS,
    "model.fit(batches, steps_per_epoch=V, verbose=0)": NO_SIZES,
    "model.fit(batches, validation_freq=V, verbose=0)": NO_SIZES,
    "model.fit(batches, validation_data=V, verbose=0)": (3, "data", THING, [3]),
    "model.fit(x, y, batch_size=V, verbose=0)": (*NO_SIZES, 10**30),
    "model.fit(x, y, batch_size=4, validation_split=V, verbose=0)": (*NO_NUMBERS, True, -1, 1.5, math.nan),
    "model.fit(x, y, batch_size=4, class_weight=V, verbose=0)": (3, "w", [1], THING, {"a": 1}, {0: "b"}),
    "model.fit(x, y, batch_size=4, sample_weight=V, verbose=0)": (3, "w", THING, [1, 2]),
    "model.fit(x, y, batch_size=4, shuffle=V, verbose=0)": (3, "yes", [], THING),
    "model.fit(batches, callbacks=V, verbose=0)": (3, "x", THING, [3], [None], [ls.CSVLogger]),
    "model.fit(batches, verbose=V)": (7, "loud", [], THING, math.nan),
    "model.evaluate(V, verbose=0)": (3, "data", None, THING, [], [3]),
    "model.evaluate(x, y, batch_size=V, verbose=0)": NO_SIZES,
    "model.predict(V)": (3, "data", None, THING, [], [3]),
    "model.train_on_batch(V, y)": (3, "data", None, THING),
    "model.predict_on_batch(V)": (3, "data", None, THING),
    "model.summary(depth=V)": NO_COUNTS,
    'model.__setattr__("learning_rate", V)': (*NO_NUMBERS, math.nan, -1),
    "model.save_weights(V)": NO_PATHS,
    "model.load_weights(V)": NO_PATHS,
    "model.load_checkpoint(V)": NO_PATHS,
    "ls.latest_checkpoint(V)": NO_PATHS,
    "ls.export_weights(V, 'weights.safetensors')": NO_PATHS,
    "ls.export_weights('.', V)": NO_PATHS,
    "ls.export_weights('.', 'w', module=V)": (3, b"model", [], THING),
    "ls.Checkpoint(thing=V)": (3, "model", None, THING),
    "ls.CheckpointManager(V, 'kept')": (3, "model", None, THING),
    "ls.CheckpointManager(checkpoint, V)": NO_PATHS,
    "ls.CheckpointManager(checkpoint, 'kept', keep=V)": NO_SIZES,
    "ls.CheckpointManager(checkpoint, 'kept', best=V)": (3, "most", [], THING),
    "ls.CheckpointManager(checkpoint, 'kept').save(V)": (*NO_COUNTS, None),
    "ls.CheckpointManager(checkpoint, 'kept').save(1, monitored=V)": NO_NUMBERS,
    "ls.ModelCheckpoint(V)": NO_PATHS,
    "ls.ModelCheckpoint('kept', monitor=V)": NO_TEXTS,
    "ls.ModelCheckpoint('kept', save_weights_only=False, keep=V)": NO_SIZES,
    "ls.ModelCheckpoint('kept', initial_value_threshold=V)": (*NO_NUMBERS, True, math.nan),
    "ls.ModelCheckpoint('kept', save_freq=V)": (*NO_NUMBERS, True, 0, -1, 1.5),
    "ls.BackupAndRestore(V)": NO_PATHS,
    "ls.BackupAndRestore('kept', exit_code=V)": (*NO_NUMBERS, True, 0, -1, 1.5, 256),
    "ls.BackupAndRestore('kept', save_freq=V)": (*NO_NUMBERS, True, 0, -1, 1.5),
    "ls.EarlyStopping(V)": NO_TEXTS,
    "ls.EarlyStopping(patience=V)": (*NO_NUMBERS, True, None, -1, math.nan),
    "ls.EarlyStopping(min_delta=V)": (*NO_NUMBERS, None, math.nan),
    "ls.EarlyStopping(mode=V)": (*NO_TEXTS, torch.ones(2)),
    "ls.EarlyStopping(baseline=V)": NO_NUMBERS,
    "ls.ReduceLROnPlateau(factor=V)": (*NO_NUMBERS, None, 1.5, math.nan),
    "ls.ReduceLROnPlateau(patience=V)": (*NO_NUMBERS, None, -1),
    "ls.LearningRateScheduler(V)": (*NO_FUNCTIONS, None),
    "ls.LambdaCallback(on_epoch_end=V)": NO_FUNCTIONS,
    "ls.CSVLogger(V)": NO_PATHS,
    "ls.CSVLogger('log.csv', separator=V)": (*NO_TEXTS, "", "ab"),
    "ls.TensorBoard(V)": NO_PATHS,
    "ls.TensorBoard('logs', update_freq=V)": (*NO_NUMBERS, True, 0, -1, 1.5),
    "ls.ProgressBar(V)": (7, "loud", THING),
    "ls.WeightsAndBiases(config=V)": (3, "lr", [3], THING),
    "ls.WeightsAndBiases(init=V)": (3, "lr", [3], THING),
    "ls.MLflow(config=V)": (3, "lr", [3], THING),
    "ls.Trackio('project', config=V)": (3, "lr", [3], THING),
    "ls.launch(V, workers=1)": NO_FUNCTIONS,
    "ls.launch(print, args=V, workers=1)": (3, "abc", THING),
    "ls.launch(print, kwargs=V, workers=1)": (3, "abc", THING),
    "ls.launch(print, workers=V)": (*NO_SIZES, *HUGE),
    "ls.launch(print, workers=1, max_restarts=V)": (*NO_COUNTS, None),
    "ls.launch(print, workers=1, timeout_s=V)": NO_TIMES,
    "ls.launch(print, workers=1, gpus_per_worker=V)": NO_COUNTS,
    "ls.launch(print, workers=1, log_dir=V)": NO_PATHS,
    "ls.fingerprint(V)": (3, None, "model", THING),
    "ls.has_rows(V)": (3, None, "batch", THING),
}


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    strategy = ls.MirroredStrategy(["cpu:0"], seed=0)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    def new() -> ls.Model:
        with strategy.scope():
            return ls.Model(torch.nn.Linear(2, 1))

    x, y = torch.randn(8, 2), torch.randn(8, 1)
    model = new()
    model.compile(optimizer=sgd, loss=torch.nn.MSELoss())
    yield {
        "ls": ls, "torch": torch, "strategy": strategy, "new": new, "model": model, "sgd": sgd, "x": x, "y": y,
        "loss": torch.nn.MSELoss(), "batches": [(x[:4], y[:4]), (x[4:], y[4:])], "run": strategy.run,
        "cluster": ls.ClusterSpec(workers=[""], index=0), "cpu": ls.config.list_physical_devices("CPU")[0],
        "variable": strategy.variable(torch.zeros(3)), "checkpoint": model.checkpoint(),
    }  # fmt: skip
    strategy.close()


@pytest.mark.parametrize("code", WRONG)
def test_a_wrong_value_is_told_in_one_line_that_shows_it(
    code: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for value in WRONG[code]:
        with pytest.raises(LockstepError) as refused:
            eval(code, {**names, "V": value})
        line = str(refused.value)
        assert "\n" not in line
        assert len(line) < 600
        assert any(each in line for each in _spellings(value)), line


def test_what_run_and_mirror_cannot_take_is_a_type_error_of_one_line(names: dict[str, Any]):
    meet = "strategy.run(lambda: ls.get_replica_context().merge_call({}))".format
    calls = [call(given) for call in ("strategy.run({})".format, meet) for given in ("V", "print, V", "print, (), V")]
    for code in (*calls, "strategy.mirror(V)"):
        for value in (3, "text", THING):
            with pytest.raises(
                TypeError, match=r"^[^\n]*(must be a|takes a)[^\n]* got [^\n]*(\nraised in replica 0 [^\n]*)?$"
            ):
                eval(code, {**names, "V": value})


@pytest.mark.parametrize("name", ["communication_options", "cluster_resolver", "cross_device_ops"])
@pytest.mark.parametrize("kind", [ls.MirroredStrategy, ls.MultiWorkerMirroredStrategy, ls.ParallelStrategy])
def test_an_argument_of_tf_distribute_is_told_what_it_is_here(kind: Any, name: str):
    with pytest.raises(ConfigError, match=f"^{name} was given, .*(communication=|cluster=|leave it out)"):
        kind(**{name: None})


def _spellings(value: Any) -> Iterator[str]:
    """How a message may name what was received: its code, its class, its size, or these of an item of it."""
    yield type(value).__name__
    if value is SHY:
        return
    yield from (repr(value)[:40], str(value)[:40] or "''")
    if isinstance(value, type):
        yield value.__name__
    if isinstance(value, torch.Tensor):
        yield from (str(tuple(value.shape)), *(f" {rows}" for rows in value.shape[:1]))
    if value is None or (isinstance(value, torch.Tensor) and not value.ndim) or isinstance(value, int):
        yield from (" no ", "1 items", "scalar", "shape ()")
    if isinstance(value, (list, dict)):
        yield from () if value else ("no workers", "no batch")
        for item in value.values() if isinstance(value, dict) else value:
            yield from _spellings(item)
    if isinstance(value, bytes):
        yield str(value[0])
