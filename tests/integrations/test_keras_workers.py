"""Keras models on two workers of two replicas each: one device's numbers, one chief's files, errors on all."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

keras = pytest.importorskip("keras")

import lockstep as ls  # noqa: E402

pytestmark = [pytest.mark.workers, pytest.mark.slow]

PROGRAM = str(Path(__file__).parent / "programs" / "keras_models.py")
NAMES = ("functional", "own steps", "torch modules", "recurrent")


def load() -> Any:
    return SimpleNamespace(**runpy.run_path(PROGRAM, run_name="keras_models"))


def job(program: str, folder: str) -> dict[str, Any]:
    """What each worker's model becomes, predicts and saves, and what it raises where the workers' batches differ."""
    programs = SimpleNamespace(**runpy.run_path(program, run_name="keras_models"))
    import torch

    import lockstep as ls
    from lockstep.collectives.communicator import all_gather_object
    from lockstep.errors import DataError, UsageError
    from lockstep.integrations.keras import BackupAndRestore

    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    strategy = ls.MultiWorkerMirroredStrategy(replicas=4, seed=0)
    found: dict[str, Any] = {}
    for name in ("functional", "own steps", "torch modules", "recurrent"):
        model, history = programs.train((programs.PROGRAMS | programs.PUBLISHED)[name], strategy)
        found[name] = [torch.from_numpy(each) for each in model.get_weights()], history
    loop = programs.train_in_loop("adam", strategy)
    found["loop"] = {kind: [torch.as_tensor(each) for each in loop[kind]] for kind in loop}
    found["predicted"] = torch.from_numpy(model.predict(programs.TOKENS[:7], verbose=0))
    model.save(f"{folder}/{strategy.workers.index}.keras")
    try:
        model.train_on_batch(programs.TOKENS[strategy.workers.index :][:8], programs.TOKENS[:8] % 4)
    except DataError as error:
        found["error"] = str(error)
    # The chief alone reads and writes: every worker has a folder of its own.
    backup = f"{folder}-backup-of-{strategy.workers.index}"
    try:
        programs.train_with_dropout(strategy, BackupAndRestore(backup, 2), programs.Interruption(3))
    except InterruptedError:
        found["backups"] = [path.name for path in Path(backup).glob("*")]
    resumed = programs.train_with_dropout(strategy, BackupAndRestore(backup, 2), seed=2)
    found["resumed"] = [torch.from_numpy(each) for each in resumed]
    programs.keras.utils.set_random_seed(strategy.workers.index)
    other = programs.distribute(programs.sequential(), strategy)
    other.compile("sgd", programs.entropy())
    try:
        other.train_on_batch(programs.X, programs.LABELS)
    except UsageError as error:
        found["weights"] = str(error)
    both = all_gather_object(strategy.workers, "what was found", found)
    strategy.close()
    return {"chief": both[0], "other": both[1]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("job")
    return {"folder": folder, **ls.launch(job, workers=2, args=(PROGRAM, str(folder)), timeout_s=170)}


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_history_are_those_of_keras_alone(results: dict[str, Any], name: str):
    programs = load()
    model, history = programs.train((programs.PROGRAMS | programs.PUBLISHED)[name], None)
    for worker in ("chief", "other"):
        weights, found = results[worker][name]
        assert programs.largest_difference([each.numpy() for each in weights], model.get_weights()) < 1e-6
        assert programs.largest_difference(found, history) < 2e-5
    assert all(map(lambda one, other: bool((one == other).all()), results["chief"][name][0], results["other"][name][0]))


def test_a_loop_of_its_own_has_the_numbers_of_keras_alone(results: dict[str, Any]):
    programs = load()
    expected = programs.train_in_loop("adam", None)
    for worker in ("chief", "other"):
        for kind, found in results[worker]["loop"].items():
            assert programs.largest_difference([each.numpy() for each in found], expected[kind]) < 2e-5


def test_every_worker_has_all_predictions_and_the_chief_alone_saves(results: dict[str, Any]):
    programs = load()
    saved = keras.models.load_model(results["folder"] / "0.keras")
    expected = saved.predict(programs.TOKENS[:7], verbose=0)
    for worker in ("chief", "other"):
        assert programs.largest_difference([results[worker]["predicted"].numpy()], [expected]) < 1e-6
    assert [path.name for path in results["folder"].iterdir()] == ["0.keras"]


def test_the_bits_are_those_of_four_replicas_in_one_process(
    results: dict[str, Any], split_cpu: Callable[[int], tuple[Any, ...]]
):
    programs = load()
    with closing(ls.MirroredStrategy(split_cpu(1), replicas=4, seed=0)) as strategy:
        for name in NAMES:
            model, _ = programs.train((programs.PROGRAMS | programs.PUBLISHED)[name], strategy)
            weights, _ = results["chief"][name]
            assert programs.largest_difference([each.numpy() for each in weights], model.get_weights()) == 0.0


def test_an_interrupted_training_continues_at_the_batch_with_the_bits_of_one_that_was_not(
    results: dict[str, Any], split_cpu: Callable[[int], tuple[Any, ...]]
):
    programs = load()
    with closing(ls.MirroredStrategy(split_cpu(1), replicas=4, seed=0)) as strategy:
        expected = programs.train_with_dropout(strategy)
    assert len(results["chief"]["backups"]) == 1
    assert results["other"]["backups"] == []
    for worker in ("chief", "other"):
        weights = [each.numpy() for each in results[worker]["resumed"]]
        assert programs.largest_difference(weights, expected) == 0.0


@pytest.mark.parametrize("kind", ["error", "weights"])
def test_workers_with_other_batches_or_weights_end_alike(results: dict[str, Any], kind: str):
    assert "worker 1" in results["chief"][kind]
    assert results["chief"][kind] == results["other"][kind]
