from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.train.callbacks import BackupAndRestore, MLflow
from lockstep.train.logs import History

if importlib.util.find_spec("mlflow") is None:
    pytest.skip("the extra `loggers` is not installed", allow_module_level=True)

Fit = Callable[..., History]
Expected = Callable[[History], dict[str, dict[int, float]]]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database, one for all tests, since making its tables takes longer than they do."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/runs.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        yield uri


@pytest.fixture
def client(uri: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(uri)


def runs(client: Any, experiment: str) -> list[Any]:
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def scalars(client: Any, run: Any) -> dict[str, dict[int, float]]:
    id_ = run.info.run_id
    return {tag: {each.step: each.value for each in client.get_metric_history(id_, tag)} for tag in run.data.metrics}


def test_the_scalars_of_every_epoch_can_be_read_back(logged_fit: Fit, expected: Expected, client: Any, uri: str):
    history = logged_fit(MLflow("epochs", name="first", config={"lr": 0.05}, tracking_uri=uri))
    (run,) = runs(client, "epochs")
    assert scalars(client, run) == expected(history)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params == {"lr": "0.05"}


def test_an_interrupted_run_is_closed_as_failed_and_goes_on_when_resumed(
    logged_fit: Fit, client: Any, uri: str, tmp_path: Path
):
    def logger() -> MLflow:
        return MLflow("resumed", config={"lr": 0.05}, update_freq=2, tracking_uri=uri)

    logged_fit(logger(), BackupAndRestore(tmp_path), interrupted_in=1)
    (interrupted,) = runs(client, "resumed")
    logged_fit(logger(), BackupAndRestore(tmp_path))

    (run,) = runs(client, "resumed")
    assert (interrupted.info.status, run.info.status) == ("FAILED", "FINISHED")
    assert list(scalars(client, run)["epoch_loss"]) == [0, 1]
    assert list(scalars(client, run)["batch_loss"]) == [2, 4, 6]


def test_a_run_of_the_program_is_used_and_left_open(logged_fit: Fit, client: Any):
    import mlflow

    with mlflow.start_run() as own:
        logged_fit(MLflow())
        assert mlflow.active_run() is own
        assert client.get_run(own.info.run_id).info.status == "RUNNING"
    assert list(scalars(client, client.get_run(own.info.run_id))["epoch_loss"]) == [0, 1]
