"""``lockstep run`` on several hosts: launchers that make one job, 127.0.0.1 and 127.0.0.2 being the hosts."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from tests.cli.conftest import Start
from tests.conftest import FreePorts

from lockstep.membership.failure_report import EXIT_OF_SURVIVOR
from lockstep_tools.cli import main

pytestmark = [pytest.mark.workers, pytest.mark.slow]

LIMIT_S = 60
PROGRAMS = Path(__file__).parent / "programs"
MEET, LISTENERS, WAIT = ((PROGRAMS / name).read_text() for name in ("meet.py", "listeners.py", "wait.py"))


@pytest.fixture
def port(free_ports: FreePorts) -> int:
    """A port at which nobody listens."""
    (port,) = free_ports(1)
    return port


def ends(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def said_by_us(err: str) -> list[str]:
    """torch's own C++ log may tell of a store that went as the job ended."""
    return [line for line in err.splitlines() if line.startswith("lockstep")]


def test_hosts_of_a_list_make_one_job(start_lockstep: Start, write, port: int):
    hosts = f"127.0.0.1:{port},127.0.0.2:{port}"
    program = write(MEET + "print(os.environ['RANK'], rank.item(), os.environ['TORCHELASTIC_RUN_ID'])")
    words = ("run", "--workers", "1", "--output", "all", "--quiet", "--hosts", hosts, "--index")

    late, first = [start_lockstep(*words, index, program, forks_workers=True) for index in ("1", "0")]

    (code, out, err), (late_code, late_out, late_err) = ends(first), ends(late)
    assert (code, said_by_us(err), late_code, said_by_us(late_err)) == (0, [], 0, [])
    assert out.split()[:3] == ["[0]", "0", "1.0"]
    assert late_out.split()[:3] == ["[1]", "1", "1.0"]
    assert out.split()[3] == late_out.split()[3]


def test_every_host_says_which_worker_failed_first(start_lockstep: Start, write, port: int):
    program = write("import os, signal\nif os.environ['RANK'] == '1': raise ValueError('lost')\nsignal.pause()")
    words = ("run", "--workers", "1", "--quiet", "--hosts", f"127.0.0.1:{port},127.0.0.2:{port}", "--index")
    first, second = [start_lockstep(*words, index, program) for index in ("0", "1")]
    assert ends(first) == (EXIT_OF_SURVIVOR, "", "lockstep: error: worker 1 of 2 failed: ValueError: lost (host 1)\n")
    assert "lockstep: error: worker 1 of 2 failed with the ValueError above; its log is " in ends(second)[2]


def test_a_host_that_is_done_hears_of_the_failure_of_another(start_lockstep: Start, write, port: int):
    fail = "import os, select, sys\nif os.environ['RANK'] == '1':\n    sys.stdin.read(); raise ValueError('lost')"
    words = ("run", "--workers", "1", "--quiet", "--hosts", f"127.0.0.1:{port},127.0.0.2:{port}", "--index")
    program = write(fail)
    first, second = [start_lockstep(*words, index, program) for index in ("0", "1")]
    assert ends(second)[0] == 1
    assert ends(first) == (EXIT_OF_SURVIVOR, "", "lockstep: error: worker 1 of 2 failed: ValueError: lost (host 1)\n")


def test_hosts_that_know_only_the_first_make_one_job(start_lockstep: Start, write, port: int):
    program = write(
        MEET + "print(os.environ['WORLD_SIZE'], rank.item(), os.environ['TORCHELASTIC_RUN_ID'])\n" + LISTENERS
    )
    words = ("run", "--workers", "1", "--output", "all", "--quiet", "--hosts", f"127.0.0.1:{port}", "--nodes", "2")

    processes = [start_lockstep(*words, "--index", index, program, forks_workers=True) for index in "01"]

    endings = [ends(process) for process in processes]
    assert [(code, said_by_us(err)) for code, _, err in endings] == [(0, []), (0, [])]
    lines = [out.splitlines() for _, out, _ in endings]
    assert [each[0].split()[1:3] for each in lines] == [["2", "1.0"]] * 2
    assert lines[0][0].split()[3] == lines[1][0].split()[3]
    assert not {a for each in lines for a in each[1].split()[2:]} & {"00000000", "0" * 32}


def test_a_launcher_of_another_job_is_turned_away(start_lockstep: Start, write, port: int):
    hosts = f"127.0.0.1:{port},127.0.0.2:{port}"
    program = write(WAIT)
    first = start_lockstep("run", "--workers", "1", "--quiet", "--hosts", hosts, "--index", "0", program)
    stray = start_lockstep("run", "--workers", "1", "--quiet", "--hosts", hosts, "--index", "1", program, "--lr", "2")
    code, _, err = ends(stray)
    assert (code, err.count("\n")) == (1, 1)
    assert f"the store at 127.0.0.1:{port} belongs to job 'program.py with arguments " in err
    first.kill()


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str], write, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main(["run", "--hosts", f"127.0.0.1:{port},127.0.0.2:{port}", "--index", "0", write(WAIT)])
    assert code == 1
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err
    assert not (tmp_path / "lockstep-logs").exists()


def test_a_host_that_does_not_come_is_named(
    capsys: pytest.CaptureFixture[str], write, tmp_path: Path, monkeypatch, port
):
    monkeypatch.chdir(tmp_path)
    hosts = f"127.0.0.1:{port},127.0.0.2:{port}"
    assert main(["run", "--timeout-s", "0.5", "--hosts", hosts, "--index", "0", write(WAIT)]) == 1
    assert f"waited 0.5 s for host 1 (127.0.0.2:{port})" in capsys.readouterr().err
