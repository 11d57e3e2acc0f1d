from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.train.callbacks import BackupAndRestore, Trackio
from lockstep.train.logs import History

if importlib.util.find_spec("trackio") is None:
    pytest.skip("the extra `loggers` is not installed", allow_module_level=True)

Fit = Callable[..., History]
Expected = Callable[[History], dict[str, dict[int, float]]]


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The folder of trackio's databases, which it reads when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            patch.delenv(name, raising=False)
        import trackio  # noqa: F401

        yield


def scalars(project: str, run: str) -> dict[str, dict[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    found: dict[str, dict[int, float]] = {}
    for row in SQLiteStorage.get_logs(project, run):
        for tag, value in row.items():
            if tag.startswith(("epoch_", "batch_")):
                found.setdefault(tag, {})[row["step"]] = value
    return found


def runs(project: str) -> list[Any]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_runs(project)


def test_the_scalars_of_every_epoch_can_be_read_back(logged_fit: Fit, expected: Expected):
    from trackio.sqlite_storage import SQLiteStorage

    history = logged_fit(Trackio("epochs", name="first", config={"lr": 0.05}))
    assert runs("epochs") == ["first"]
    assert scalars("epochs", "first") == expected(history)
    assert SQLiteStorage.get_run_config("epochs", "first")["lr"] == 0.05


def test_an_interrupted_run_is_closed_and_goes_on_when_resumed(logged_fit: Fit, tmp_path: Path):
    logged_fit(Trackio("resumed", update_freq=2), BackupAndRestore(tmp_path), interrupted_in=1)
    logged_fit(Trackio("resumed", update_freq=2), BackupAndRestore(tmp_path))
    (run,) = runs("resumed")
    assert list(scalars("resumed", run)["epoch_loss"]) == [0, 1]
    assert list(scalars("resumed", run)["batch_loss"]) == [2, 4, 6]


def test_a_run_of_the_program_is_used_and_left_open(logged_fit: Fit):
    import trackio
    from trackio import context_vars

    own = trackio.init("mine", name="own", embed=False, auto_log_cpu=False)
    logged_fit(Trackio("another"))
    assert context_vars.current_run.get() is own
    trackio.finish()
    assert runs("another") == []
    assert list(scalars("mine", "own")["epoch_loss"]) == [0, 1]
