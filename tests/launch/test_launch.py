"""``ls.launch``: a function in worker processes, its result, how it fails, and that nothing is left of it."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.errors import ClusterError, ConfigError

pytestmark = pytest.mark.workers

Start = Callable[..., subprocess.Popen[str]]

LIMIT_S = 60
ENDED_WITHIN_S = 20  # much less on a machine that has nothing else to do; without any care it is never


@pytest.fixture(autouse=True)
def _leaves_no_temporary_files() -> Iterator[None]:
    def ours() -> set[str]:
        return {file.name for file in Path(tempfile.gettempdir()).glob("pytorch-errorfile-*")}

    before = ours()
    yield
    assert ours() <= before


def summed(value: float) -> torch.Tensor:
    dist.init_process_group("gloo")
    tensor = torch.tensor([value + int(os.environ["RANK"])])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor


@pytest.mark.parametrize("workers", [2, 3])
def test_the_chief_s_result_comes_back(workers: int):
    assert ls.launch(summed, workers=workers, args=(1.0,)).item() == workers + sum(range(workers))


def raises(worker: int, error: BaseException) -> None:
    if os.environ["RANK"] == str(worker):
        raise error
    dist.init_process_group("gloo")


def test_the_error_of_a_worker_is_the_cause_and_the_worker_is_named():
    with pytest.raises(ClusterError, match=r"^worker 1 of 2 failed: ValueError: no such file$") as caught:
        ls.launch(raises, workers=2, args=(1, ValueError("no such file")))
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    shown = str(cause.__cause__)
    assert "raise error" in shown
    assert "launch/worker.py" not in shown


class Stubborn(Exception):
    """Cannot be rebuilt from its args."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@pytest.mark.slow
def test_an_error_that_cannot_be_rebuilt_is_shown_as_text():
    def fail() -> None:
        raise Stubborn("a", "b")

    with pytest.raises(ClusterError, match="worker 0 of 1 failed: Stubborn: ab") as caught:
        ls.launch(fail, workers=1)
    assert "Stubborn: ab" in str(caught.value.__cause__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "worker 0 of 1 was killed by SIGKILL"),
        (lambda: os._exit(0), "worker 0 of 1 ended before it returned"),
        (lambda: os._exit(3), "worker 0 of 1 ended with exit code 3"),
        (lambda: sys.exit("no data"), "worker 0 of 1 failed: SystemExit: no data"),
        (lambda: threading.Lock(), "worker 0 of 1 failed: TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_a_worker_that_gives_no_result_is_named(end, said: str):
    with pytest.raises(ClusterError, match=said):
        ls.launch(end, workers=1)


def waits_for_ever() -> None:
    signal.pause()


@pytest.mark.slow
def test_when_they_take_too_long_they_are_ended_and_it_is_told_where_each_stood():
    ls.launch(os.getpid, workers=1)  # from now on a worker starts within a moment

    with pytest.raises(ClusterError, match=r"the 2 workers had not ended after 3 s and were ended") as caught:
        ls.launch(waits_for_ever, workers=2, timeout_s=3)

    (stood,) = caught.value.__notes__
    assert stood.count("in waits_for_ever\n") == 2
    assert [line for line in stood.splitlines() if line.startswith("worker")] == [
        "worker 0 stood here:",
        "worker 1 stood here:",
    ]


def stops_itself_and_another_fails(folder: str) -> None:
    """Worker 0 fails when worker 1 is stopped; on SIGTERM worker 1 leaves a file."""
    pid, saved = Path(folder, "pid"), Path(folder, "saved")
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, lambda *_: (saved.touch(), os._exit(0)))
        pid.with_suffix(".new").write_text(str(os.getpid()))
        pid.with_suffix(".new").rename(pid)
        os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()
    until = time.monotonic() + LIMIT_S
    while not (pid.exists() and ") T " in Path(f"/proc/{pid.read_text()}/stat").read_text()):
        assert time.monotonic() < until
    raise ValueError("worker 0 is done for")


@pytest.mark.slow
def test_a_stopped_worker_gets_the_chance_to_save_and_does_not_keep_the_launcher_waiting(tmp_path: Path):
    before = time.monotonic()
    with pytest.raises(ClusterError, match="worker 0 is done for"):
        ls.launch(stops_itself_and_another_fails, workers=2, args=(str(tmp_path),))
    assert time.monotonic() - before < ENDED_WITHIN_S
    assert (tmp_path / "saved").exists()


def leaves_a_process_behind() -> None:
    """The worker waits for it when it ends, and torch's agent for the worker."""
    process = multiprocessing.Process(target=signal.pause)
    process.start()
    sys.stdout.write(f"{process.pid}\n")


@pytest.mark.slow
def test_they_are_ended_when_they_take_too_long_to_end(capsys: pytest.CaptureFixture[str]):
    ls.launch(os.getpid, workers=1)  # from now on a worker starts within a moment
    with pytest.raises(ClusterError, match=r"the 1 workers had not ended after 3 s and were ended"):
        ls.launch(leaves_a_process_behind, workers=1, timeout_s=3)
    with suppress(ProcessLookupError):  # it may be gone already
        handle = os.pidfd_open(int(capsys.readouterr().out))
        assert select.select([handle], [], [], LIMIT_S)[0]
        os.close(handle)


def fails_once() -> str:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise ValueError("once")
    dist.init_process_group("gloo")
    sys.stdout.write(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
    dist.barrier()
    dist.destroy_process_group()
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


@pytest.mark.slow
def test_all_start_again_after_a_failure_and_each_attempt_has_its_logs(tmp_path: Path):
    logs = tmp_path / "logs"
    assert ls.launch(fails_once, workers=2, max_restarts=1, log_dir=logs) == "1"
    assert (logs / "worker-1.attempt-1.log").read_text() == "attempt 1\n"
    assert {file.stat().st_mode & 0o077 for file in logs.iterdir()} == {0}  # for its owner alone
    assert sorted(file.name for file in logs.iterdir()) == [
        f"worker-{worker}{attempt}.log" for worker in (0, 1) for attempt in (".attempt-1", "")
    ]


@pytest.mark.slow
def test_only_the_chief_is_heard(capsys: pytest.CaptureFixture[str]):
    ls.launch(lambda: sys.stdout.write(f"I am {os.environ['RANK']}\n"), workers=2)
    assert capsys.readouterr() == ("I am 0\n", "")


def place() -> dict[str, object]:
    return {
        "variables": dict(os.environ),
        "threads": torch.get_num_threads(),
        "folder": str(Path.cwd()),
        "handlers": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    }


def test_a_worker_has_this_process_s_variables_and_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("OF_THIS_TEST", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    found = ls.launch(place, workers=2)

    variables = found["variables"]
    assert variables["OF_THIS_TEST"] == "1"
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == ("0", "2", "127.0.0.1")
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert found["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert (found["folder"], found["handlers"]) == (str(tmp_path), True)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.slow
def test_it_works_in_a_thread():
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(ls.launch(lambda: "done", workers=1)))
    thread.start()
    thread.join(LIMIT_S)
    assert results == ["done"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers=0 was given, expected at least 1"),
        ({"workers": 1, "max_restarts": -1}, "max_restarts=-1 was given, expected at least 0"),
        ({"workers": 1, "timeout_s": 0}, "timeout_s=0 was given, expected a number of seconds above 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, int], said: str):
    with pytest.raises(ConfigError, match=said):
        ls.launch(summed, **options)


UNGUARDED = """
import os, lockstep as ls
print("top")
class Point:
    def __init__(self, x): self.x = x
def work(x): return Point(x + int(os.environ["WORLD_SIZE"]))
print(ls.launch(work, workers=2, args=(1,)).x)
"""


@pytest.mark.slow
def test_functions_of_main_travel_and_main_is_not_run_again(tmp_path: Path, python: Start):
    (tmp_path / "script.py").write_text(UNGUARDED)
    process = python("script.py")
    out, err = process.communicate(timeout=LIMIT_S)
    assert (out, process.returncode) == ("top\n3\n", 0), err


@pytest.mark.slow
def test_so_they_do_from_a_program_that_is_no_file(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-"], input=UNGUARDED, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.stdout, done.returncode) == ("top\n3\n", 0), done.stderr


IN_A_LOADER_AND_IN_A_COLLECTIVE = """
import os, signal, pathlib, lockstep as ls
from torch.utils.data import DataLoader
class Stuck:
    def __len__(self): return 1
    def __getitem__(self, index):
        print(os.getpid(), os.getppid(), pathlib.Path("worker-1").read_text(), flush=True)
        signal.pause()
def work():
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"])
    if strategy.workers.index == 1:
        pathlib.Path("worker-1").write_text(str(os.getpid()))
    strategy.workers.all_gather_numbers("both are here")
    if strategy.workers.index == 0:
        next(iter(DataLoader(Stuck(), num_workers=1)))
    strategy.workers.all_gather_numbers("the other never comes")
ls.launch(work, workers=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_workers_and_what_they_started_end_with_the_process_that_launched_them(sign, tmp_path: Path, python: Start):
    process = python("-c", IN_A_LOADER_AND_IN_A_COLLECTIVE, TMPDIR=str(tmp_path))
    handles = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
    sent = time.monotonic()

    process.send_signal(sign)

    assert len(handles) == 3
    assert all(select.select([handle], [], [], LIMIT_S)[0] for handle in handles)
    assert time.monotonic() - sent < ENDED_WITHIN_S
    for handle in handles:
        os.close(handle)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -sign, err
    assert ("KeyboardInterrupt" in err) == (sign == signal.SIGINT)
    assert list(tmp_path.glob("lockstep-*")) == [] or sign == signal.SIGKILL  # after which nobody can tidy up


SAVED_AND_STOPPED = """
import os, torch, lockstep as ls
from lockstep_tools.cli.in_workers import InWorkers
def tell(batch, logs):
    if batch == 0: print("begun", os.getpid(), flush=True)
def work(*_):
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=0)
    with strategy.scope():
        network = torch.nn.Linear(4, 1)
        model = ls.Model(network)
        model.compile(torch.optim.SGD(network.parameters(), 0.1), loss=torch.nn.MSELoss(reduction="none"))
    callbacks = [ls.BackupAndRestore("backup", save_freq=False), ls.LambdaCallback(on_train_batch_end=tell)]
    model.fit([(torch.ones(8, 4), torch.ones(8, 1))] * 10**7, verbose=0, callbacks=callbacks)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launches", "to"),
    [
        ("ls.launch(work, workers=2)", "launcher"),
        ("raise SystemExit(InWorkers(workers=2).run(work, []))", "launcher"),  # as lockstep train mlm --tensor 2 does
        ("raise SystemExit(InWorkers(workers=2).run(work, []))", "worker"),
    ],
)
def test_after_sigterm_and_a_backup_the_launcher_ends_with_75_too(
    launches: str, to: str, tmp_path: Path, python: Start
):
    process = python("-c", SAVED_AND_STOPPED + launches)
    worker = int(process.stdout.readline().split()[1])
    os.kill(worker if to == "worker" else process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (75, "")
    assert list((tmp_path / "backup").glob("step-*"))


STEPS_IN_WORKERS = """
import torch, lockstep as ls
def work():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], 0.1).step()
ls.launch(work, workers=2)
"""


@pytest.mark.slow
def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path, python: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    process = python("-c", STEPS_IN_WORKERS)
    assert process.wait(LIMIT_S) == 0
    assert list(tmp_path.iterdir()) == []


HANDLES_SIGTERM = """
import os, signal, sys, lockstep as ls
from lockstep.errors import ClusterError
def work():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("ready", os.getpid(), flush=True)
    while True: signal.pause()
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
try:
    ls.launch(work, workers=1)
except ClusterError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_program_that_handles_sigterm_gets_it_when_the_workers_have_ended(python: Start):
    process = python("-c", HANDLES_SIGTERM)
    process.stdout.readline()
    process.terminate()
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[0] == "handled"
    assert "SIGTERM" in out.splitlines()[1]


def start_method() -> str:
    return multiprocessing.get_start_method()


@pytest.mark.slow
def test_what_a_worker_starts_is_started_as_in_any_program():
    assert ls.launch(start_method, workers=1) == multiprocessing.get_start_method()
