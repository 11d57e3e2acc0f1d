"""``lockstep run`` on one host as a person meets it: real workers, real failures, real signals."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli.conftest import Run, Start

import lockstep
from lockstep_tools.cli import main

pytestmark = pytest.mark.workers

LIMIT_S = 60
PROGRAMS = Path(__file__).parent / "programs"
MEET, LISTENERS, WAIT = ((PROGRAMS / name).read_text() for name in ("meet.py", "listeners.py", "wait.py"))


def logs_of(tmp_path: Path) -> dict[str, str]:
    (folder,) = (tmp_path / "lockstep-logs").iterdir()
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_the_workers_meet_the_chief_is_heard_and_every_worker_has_a_log(run_lockstep: Run, write, tmp_path: Path):
    program = MEET + "print('sum', rank.item(), sys.argv[1:], __name__, flush=True); print('warned', file=sys.stderr)"
    done = run_lockstep("run", "--workers", "3", write(program), "--lr", "1$$ ${x}", forks_workers=True)
    line = "sum 3.0 ['--lr', '1$$ ${x}'] __main__\n"
    assert (done.returncode, done.stdout) == (0, line)
    told, warned = done.stderr.splitlines()
    assert told.startswith("lockstep: 3 workers on this host, 1 thread each; logs in lockstep-logs/")
    assert warned == "warned"
    assert logs_of(tmp_path) == {f"worker-{worker}.log": f"{line}warned\n" for worker in range(3)}


def shown_on_terminal(*words: str, columns: int, folder: Path) -> str:
    """What ``lockstep run`` writes to a terminal of that width."""
    terminal, shown = pty.openpty()
    termios.tcsetwinsize(shown, (24, columns))
    command = [sys.executable, "-m", "lockstep_tools.cli", "run", "--quiet", *words]
    # readline, which pytest imports, sets COLUMNS past os.environ, and so do programs that other tests ran.
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdout=shown, cwd=folder, env=environment)
    os.close(shown)
    text = b""
    try:
        # Read while it runs: a terminal takes a few kilobytes, and then whoever writes waits.
        with suppress(OSError):  # which a terminal that nobody has open any more ends with
            while part := os.read(terminal, 1000):
                text += part
        assert process.wait(timeout=LIMIT_S) == 0
    finally:
        os.close(terminal)
        process.kill()
        process.wait()
    return text.decode()


FIT = """
import torch
import lockstep as ls

with ls.MultiWorkerMirroredStrategy(["cpu:0"]).scope():
    model = ls.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
model.fit([(torch.ones(4, 2), torch.ones(4, 1))] * 3, epochs=2)
model.strategy.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("output", "bars", "prefix"), [("chief", 2, ""), ("all", 0, "[0] ")])
def test_on_a_terminal_a_training_has_one_bar_and_not_one_of_each_worker(
    output: str, bars: int, prefix: str, write, tmp_path: Path
):
    """Where the lines of all workers are shown, there is no bar: they would come between its pieces."""
    shown = shown_on_terminal("--workers", "2", "--output", output, write(FIT), columns=100, folder=tmp_path)

    assert shown.count("first step") == bars  # as each epoch's bar begins with
    assert ("%|" in shown) is bool(bars)
    lines = [line.rpartition("\r")[2] for line in shown.replace("\r\n", "\n").splitlines() if " 3 steps, " in line]
    assert [line.partition(": 3 steps, ")[0].replace("\x1b[1m", "") for line in lines] == [
        f"{prefix}epoch 1/2",
        f"{prefix}epoch 2/2",
    ]


@pytest.mark.slow
def test_on_a_terminal_the_lines_of_the_chief_break_between_words(write, tmp_path: Path):
    words = "Each word of this line stays whole, though the terminal is narrower than the line."
    bar = "print(f'bar {console.shows_bar()}')"
    program = write(f"from lockstep import console; console.write_line(console.fill({words!r})); {bar}")

    *lines, bar_line = shown_on_terminal("--workers", "1", program, columns=40, folder=tmp_path).splitlines()

    assert bar_line == "bar True"
    assert len(lines) == 3
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(line.strip() for line in lines) == words


@pytest.mark.slow
def test_lockstep_is_a_program_too(run_lockstep: Run, tmp_path: Path):
    done = run_lockstep("run", "--workers", "2", "--output", "all", "--quiet", "lockstep", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"lockstep {lockstep.__version__}\n"
    assert not (tmp_path / "lockstep-logs").exists()  # it is said once, and no worker is started
    done = run_lockstep("run", "--output", "all", "--quiet", "lockstep", "devices", "--devices", "cpu")
    assert done.returncode == 0
    assert "[0] logical  of     share" in done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor", "2"], "tensor=2 = 2 does not divide the 3 workers of the job"),
        (["--tensor", "3"], "tensor=3 does not divide heads=2; choose 1 or 2"),
        (["--hidden", "x"], "see lockstep train mlm --help"),
    ],
)
def test_what_is_wrong_with_its_words_is_said_once_and_no_worker_is_started(
    words: list[str], said: str, run_lockstep: Run, tmp_path: Path
):
    done = run_lockstep("run", "--workers", "3", "lockstep", "train", "mlm", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("lockstep: error: ")
    assert said in done.stderr
    assert not (tmp_path / "lockstep-logs").exists()


@pytest.mark.slow
def test_nothing_listens_on_all_interfaces_and_every_run_has_an_id(run_lockstep: Run, write):
    done = run_lockstep("run", "--workers", "2", "--output", "all", "--quiet", write(MEET + LISTENERS))

    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(done.stdout.splitlines())
    assert [line.split()[:2] for line in lines] == [[f"[{w}]", what] for w in (0, 1) for what in ("listens", "store")]
    addresses = {address for line in lines if "listens" in line for address in line.split()[2:]}
    assert "0100007F" in addresses  # 127.0.0.1, the launcher's store
    assert not addresses & {"00000000", "0" * 32}
    assert lines[1].split()[2:4] == ["127.0.0.1", "True"]
    assert lines[1].split()[4] == lines[3].split()[4] != ""


def test_the_first_failure_is_named_with_its_traceback_not_its_victims(run_lockstep: Run, write, tmp_path: Path):
    program = MEET + "if rank and os.environ['RANK'] == '1': raise ValueError('no such file')\ndist.barrier()"

    done = run_lockstep("run", "--workers", "2", write(program), forks_workers=True)

    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-7] == "lockstep: the last output of worker 1:"
    assert lines[-6:-4] == ["Traceback (most recent call last):", '  File "program.py", line 14, in <module>']
    assert lines[-2] == "ValueError: no such file"
    (folder,) = (tmp_path / "lockstep-logs").iterdir()
    log = folder.relative_to(tmp_path) / "worker-1.log"
    assert lines[-1] == f"lockstep: error: worker 1 of 2 failed with the ValueError above; its log is {log}"
    assert "ValueError: no such file" in (tmp_path / log).read_text()


@pytest.mark.slow
def test_an_error_of_ours_in_all_workers_is_said_once(run_lockstep: Run, write):
    program = write("import lockstep as ls\nls.MirroredStrategy()")
    done = run_lockstep("run", "--workers", "2", "--quiet", program, forks_workers=True)
    said, line = done.stderr.splitlines()[-2:]
    assert done.returncode == 1
    assert said.startswith("lockstep.errors.UsageError: ")
    assert done.stderr.count("MultiWorkerMirroredStrategy") == 1
    assert done.stderr.count("  File ") == 1
    assert line.startswith("lockstep: error: worker 0 of 2 failed with the UsageError above; its log is ")


@pytest.mark.slow
def test_a_line_with_which_all_workers_end_is_shown_once(run_lockstep: Run, write):
    program = (
        MEET
        + """
print("no data", file=sys.stderr, flush=True)
dist.barrier()
if os.environ["RANK"] == "1":
    os._exit(3)
signal.pause()
"""
    )
    done = run_lockstep("run", "--workers", "2", "--quiet", write("import signal\n" + program), forks_workers=True)

    said, line = done.stderr.splitlines()
    assert (done.returncode, said) == (3, "no data")
    assert line.startswith("lockstep: error: worker 1 of 2 ended with exit code 3; its log is ")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(7)", 7, "ended with exit code 7"),
        ("sys.exit('no data')", 1, "failed: SystemExit: no data"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_worker(end: str, code: int, said: str, run_lockstep: Run, write):
    program = f"import os, sys\nprint('last words', flush=True)\n{end}\n"
    done = run_lockstep("run", "--workers", "1", write(program))
    assert (done.returncode, done.stdout) == (code, "last words\n")
    assert f"lockstep: error: worker 0 of 1 {said}; its log is " in done.stderr


@pytest.mark.slow
def test_all_start_again_after_a_failure(run_lockstep: Run, write, tmp_path: Path):
    attempt = "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nprint('attempt', attempt, rank.item())\n"
    fail = "if attempt == 0 and os.environ['RANK'] == '1': raise ValueError('once')\ndist.barrier()"

    program = write(MEET + attempt + fail)
    done = run_lockstep("run", "--workers", "2", "--max-restarts", "1", program, forks_workers=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout == "attempt 0 1.0\nattempt 1 1.0\n"
    assert "lockstep: worker 1 failed: ValueError: once; starting all again (1 of 1)" in done.stderr
    logs = logs_of(tmp_path)
    assert logs["worker-1.attempt-1.log"] == "attempt 1 1.0\n"
    assert "ValueError: once" in logs["worker-1.log"]


@pytest.mark.slow
def test_a_module_runs_as_python_m_would_run_it(run_lockstep: Run, tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    done = run_lockstep("run", "--workers", "1", "--quiet", "-m", "package.job", "--lr", "1")
    assert (done.stdout, done.stderr) == ("__main__ package ['--lr', '1']\n", "")


@pytest.mark.slow
def test_what_a_worker_leaves_behind_ends_with_the_job(run_lockstep: Run, write):
    program = "import os, signal\nleft = os.fork()\nif left: print(left)\nelse: signal.pause()"
    done = run_lockstep("run", "--workers", "1", "--quiet", write(program))
    assert done.returncode == 0
    assert has_ended(int(done.stdout))


def started_workers(process: subprocess.Popen[str], number: int) -> list[int]:
    """Handles of the workers' processes, once each has said that it is ready."""
    lines = [process.stdout.readline().split() for _ in range(number)]
    return [os.pidfd_open(int(words[2])) for words in lines]


def has_ended(pid: int) -> bool:
    """Whether the process with that number ends within the limit, or has ended."""
    try:
        return all_end([os.pidfd_open(pid)])
    except ProcessLookupError:
        return True


def all_end(handles: list[int]) -> bool:
    """Whether all those processes end within the limit."""
    ended = [bool(select.select([handle], [], [], LIMIT_S)[0]) for handle in handles]
    for handle in handles:
        os.close(handle)
    return all(ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_the_workers_and_what_they_started_end_with_the_launcher(sign, code: int, start_lockstep: Start, write):
    program = 'import os, signal\nos.fork()\nos.write(1, b"ready %d\\n" % os.getpid())\nsignal.pause()'
    process = start_lockstep("run", "--workers", "2", "--output", "all", "--quiet", write(program))
    handles = started_workers(process, 4)
    sent = time.monotonic()

    process.send_signal(sign)

    assert all_end(handles)
    assert process.wait(LIMIT_S) == code
    assert time.monotonic() - sent < 10
    said = process.stderr.read().splitlines()
    assert said[-1:] == (["lockstep: interrupted"] if sign == signal.SIGINT else [])


@pytest.mark.slow
def test_workers_save_after_sigterm_and_the_exit_code_is_theirs(start_lockstep: Start, write, tmp_path: Path):
    program = """
import os, pathlib, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # like a DataLoader's
def save(*_):
    pathlib.Path(f"saved-{os.environ['RANK']}").write_text(str(child.poll()))
    child.kill()
    child.wait()
    sys.exit(12)
signal.signal(signal.SIGTERM, save)
print("ready", os.getpid(), flush=True)
while True: signal.pause()
"""
    process = start_lockstep("run", "--workers", "2", "--output", "all", "--quiet", write(program))
    handles = started_workers(process, 2)

    process.terminate()

    assert all_end(handles)
    assert process.wait(LIMIT_S) == 12
    # What a worker has started still runs while it saves.
    assert [(tmp_path / f"saved-{worker}").read_text() for worker in (0, 1)] == ["None", "None"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["2", "2:2"])
def test_a_worker_that_failed_and_waits_for_its_own_thread_ends_the_job(workers: str, run_lockstep: Run, write):
    program = """
import os, signal, threading
if os.environ["RANK"] == "1":
    threading.Thread(target=signal.pause).start()
    raise ValueError("worker 1 is done for")
signal.pause()
"""
    done = run_lockstep("run", "--workers", workers, "--stop-s", "0.5", "--quiet", write(program))

    assert done.returncode == 1
    assert done.stderr.splitlines()[-2] == "ValueError: worker 1 is done for"
    assert "worker 1 of 2 failed with the ValueError above" in done.stderr.splitlines()[-1]


NOHUP = (
    "import signal, sys, lockstep_tools.cli as cli; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.exit(cli.main())"
)


@pytest.mark.slow
def test_nohup_keeps_the_job_when_the_terminal_closes(python: Start, write):
    process = python("-c", NOHUP, "run", "--workers", "1", "--output", "all", "--quiet", write(WAIT))
    (handle,) = started_workers(process, 1)
    process.send_signal(signal.SIGHUP)
    process.terminate()
    assert all_end([handle])
    assert process.wait(LIMIT_S) == 143  # of SIGTERM


@pytest.mark.slow
def test_a_second_sigterm_does_not_cut_short_what_the_first_allows(start_lockstep: Start, write, tmp_path: Path):
    program = """
import os, signal, sys
def save(*_):
    os.mkfifo("saving")
    with open("saving") as allowed: allowed.read()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", os.getpid(), flush=True)
while True: signal.pause()
"""
    process = start_lockstep("run", "--workers", "1", "--output", "all", "--quiet", write(program))
    handles = started_workers(process, 1)

    process.terminate()
    while not (tmp_path / "saving").exists():  # the worker has begun to save
        assert process.poll() is None
    process.terminate()
    with (tmp_path / "saving").open("w"):
        pass

    assert all_end(handles)
    assert process.wait(LIMIT_S) == 75


@pytest.mark.slow
def test_a_code_that_a_worker_chose_comes_before_the_signal_that_ended_another(start_lockstep: Start, write):
    program = """
import os, signal, sys
if os.environ["RANK"] == "1": signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", os.getpid(), flush=True)
while True: signal.pause()
"""
    process = start_lockstep("run", "--workers", "2", "--output", "all", "--quiet", write(program))
    handles = started_workers(process, 2)

    process.terminate()

    assert all_end(handles)
    assert process.wait(LIMIT_S) == 75


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a closed pipe", "a full disk", "nowhere"])
def test_the_workers_go_on_where_the_output_of_the_launcher_breaks(where: str, write, tmp_path: Path):
    said = 200_000  # more than a pipe holds
    program = write(f"import os\nprint('x' * {said})\nopen('done-' + os.environ['RANK'], 'w')")
    words = [sys.executable, "-m", "lockstep_tools.cli", "run", "--workers", "2", "--output", "all", program]
    if where == "nowhere":
        words = ["bash", "-c", 'exec "$@" >&-', "bash", *words]
    reading, writing = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("w") as full:
        out = {"a closed pipe": writing, "a full disk": full, "nowhere": None}[where]
        done = subprocess.run(words, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    os.close(writing)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()
    assert done.stderr.count("\n") == 2, done.stderr  # the first line is the usual one
    assert "standard output" in done.stderr.splitlines()[1]
    assert [len(log) for log in logs_of(tmp_path).values()] == [said + 1] * 2


@pytest.mark.slow
def test_no_file_of_ours_takes_the_number_of_a_closed_stream(write, tmp_path: Path):
    program = write(
        "import os; print(*(os.readlink(f'/proc/{os.getppid()}/fd/{n}') for n in range(3)), file=open('on', 'w'))"
    )
    words = [sys.executable, "-m", "lockstep_tools.cli", "run", "--workers", "1", program]
    done = subprocess.run(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *words], cwd=tmp_path, timeout=LIMIT_S)
    assert done.returncode == 0
    assert (tmp_path / "on").read_text().split() == [os.devnull] * 3


@pytest.mark.slow
def test_the_launcher_leaves_no_file_open(write, tmp_path: Path):
    python = [sys.executable, "-X", "dev", "-W", "always::ResourceWarning"]
    fails_once = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"

    done = subprocess.run(
        [
            *python,
            "-m",
            "lockstep_tools.cli",
            "run",
            "--workers",
            "2",
            "--max-restarts",
            "1",
            "--quiet",
            write(fails_once),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    assert done.returncode == 0
    assert "unclosed" not in done.stderr


@pytest.mark.slow
def test_a_killed_workers_semaphores_do_not_stay_in_shared_memory(run_lockstep: Run, write):
    program = """
import multiprocessing, os, signal
context = multiprocessing.get_context("spawn")
lock = context.Lock()
print(lock._semlock.name)
assert os.path.exists(f"/dev/shm/sem.{lock._semlock.name[1:]}")
os.killpg(0, signal.SIGKILL)
"""
    done = run_lockstep("run", "--workers", "1", "--quiet", write(program))

    (name,) = done.stdout.split()
    assert not Path(f"/dev/shm/sem.{name[1:]}").exists()


@pytest.mark.slow
def test_who_does_not_end_after_sigterm_is_killed(start_lockstep: Start, write):
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT.replace(
        "signal.pause()", "\nwhile True: signal.pause()"
    )
    process = start_lockstep("run", "--workers", "1", "--output", "all", "--stop-s", "0.5", write(program))
    handles = started_workers(process, 1)
    process.terminate()
    assert all_end(handles)
    assert process.wait(LIMIT_S) == 137


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such.py"], "the script 'no-such.py' does not exist, expected a Python file"),
        (["--workers", "0", "program.py"], "workers=0 was given, expected at least 1"),
        (["--stop-s", "0", "program.py"], "stop_s=0.0 was given, expected a number of seconds above 0"),
        (["--gpus-per-worker", "99", "program.py"], "99 GPUs were given for each of 1 workers"),
        (["--workers", "two", "program.py"], "--workers 'two' was given, expected a number, or MIN:MAX as in 1:4"),
        (["--workers", "1:", "program.py"], "--workers '1:' was given, expected a number, or MIN:MAX as in 1:4"),
        (["--workers", "3:2", "program.py"], "--workers 3:2 was given, but MAX starts 2 on this host"),
        (["--workers", "1:0", "program.py"], "--workers 1:0 was given, but MAX starts 0 on this host"),
        (["--workers", "5:2", "--hosts", "a:1,b:1", "--index", "0", "program.py"], "MAX starts 4 on the 2 hosts"),
        (["--workers", "2", "--rejoin-s", "9", "program.py"], "--rejoin-s 9 was given without --workers MIN:MAX"),
        (["--hosts", "a:1,b:1", "program.py"], "--hosts and --index go together"),
        (["--hosts", "a:1,b:1", "--index", "2", "program.py"], "index=2 was given for 2 hosts, expected 0 to 1"),
        (["--hosts", "a:1,a:1", "--index", "0", "program.py"], "hosts=a:1,a:1 names one twice"),
        (["--nodes", "2", "program.py"], "--hosts and --index go together"),
        (["--hosts", "a:1,b:1", "--index", "0", "--nodes", "3", "program.py"], "but --hosts names 2"),
        ([], "Missing argument 'PROGRAM'; see lockstep run --help"),
    ],
)
def test_what_was_asked_wrongly_is_one_line_and_2(words, said, capsys, write, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(WAIT)
    assert main(["run", *words]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
    assert not (tmp_path / "lockstep-logs").exists()
