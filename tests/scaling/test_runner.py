"""Real processes that fail: the error is theirs, the name is the configuration's, and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.recipes.images.config import ImagesConfig
from lockstep.scaling.plan import ScalingSettings
from lockstep.scaling.runner import Trial, run_trial

LIMIT_S = 150  # it first imports, for 60 s where the machine is very busy
ASK = """
import multiprocessing
import os
import signal
import sys
import threading
from lockstep.scaling.plan import Hardware, plan
from lockstep.scaling.plan import ScalingSettings
from lockstep.scaling.runner import Trial, run_trial
from lockstep.config import list_logical_devices
from lockstep.recipes.images.config import ImagesConfig

if __name__ == "__main__":
    settings = ScalingSettings(batch_size=64, replicas=(2,), epochs=10_000)
    (cpu,) = list_logical_devices("CPU")
    configuration, *_ = plan(settings, Hardware(devices=(cpu, cpu), cores=2))
    trial = Trial(
        recipe="images", config=ImagesConfig(workers=0), devices="cpu:2", configuration=configuration, settings=settings
    )
    if sys.argv[1:] == ["--interrupt"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it

        def interrupt():
            while not multiprocessing.active_children():
                begun.wait(0.05)
            os.killpg(0, signal.SIGINT)

        begun = threading.Event()
        threading.Thread(target=interrupt).start()
        try:
            run_trial(trial)
        except KeyboardInterrupt:
            sys.exit(130)
    thread = threading.Thread(target=run_trial, args=(trial,))
    thread.start()
    while not multiprocessing.active_children():
        thread.join(0.05)
    print(multiprocessing.active_children()[0].pid, flush=True)
"""


def interrupt_children() -> None:
    """The part of it that the measuring process sees. Other children are those of other tests."""
    for child in multiprocessing.active_children():
        if child.pid is not None:
            os.kill(child.pid, signal.SIGINT)


def trial(make, *, data: Path | None = None, epochs: int = 1) -> Trial:
    return Trial(
        recipe="images",
        config=ImagesConfig(data=data, workers=0, width_multiplier=0.1),
        devices="cpu:2",
        configuration=make.plan(2, cores=2, devices=2)[0],
        settings=ScalingSettings(batch_size=64, replicas=(2,), warm_up=1, epochs=epochs),
    )


@pytest.mark.workers
def test_the_process_s_own_error_comes_back_and_no_traceback(make, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(DataError, match=r"no-such-folder' does not exist; .* \(while measuring '1 device'\)"):
        run_trial(trial(make, data=tmp_path / "no-such-folder"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.workers
def test_ctrl_c_ends_the_process_in_silence(tmp_path: Path):
    """As a terminal sends it: to every process of the program, which has a group of its own here."""
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    done = subprocess.run(
        [sys.executable, script, "--interrupt"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.workers
def test_ctrl_c_is_for_the_process_that_asked_to_handle(make, tmp_path: Path):
    timer = threading.Timer(0.5, interrupt_children)
    timer.start()
    with pytest.raises(DataError, match="no-such-folder"):
        run_trial(trial(make, data=tmp_path / "no-such-folder"))
    timer.join()


@pytest.mark.workers
def test_the_process_ends_when_the_one_that_asked_is_killed(tmp_path: Path):
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    started = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    child = int(started.stdout.readline())
    handle = os.pidfd_open(child)
    started.kill()
    started.wait()
    started.stdout.close()

    ended, _, _ = select.select([handle], [], [], LIMIT_S)
    os.close(handle)
    if not ended:
        os.kill(child, signal.SIGKILL)
    assert ended
