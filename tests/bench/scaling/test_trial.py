"""Real processes that fail: the error is theirs, the name is the configuration's, and none is left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from lockstep.bench.scaling.settings import ScalingSettings
from lockstep.bench.scaling.trial import Trial, run_trial
from lockstep.errors import ConfigError, DataError
from lockstep.recipes.images.config import ImagesConfig


def trial(make, *, devices: str = "cpu:2", data: Path | None = None, epochs: int = 1) -> Trial:
    return Trial(
        recipe="images",
        config=ImagesConfig(data=data, workers=0, width_multiplier=0.1),
        devices=devices,
        configuration=make.plan(2, cores=2, devices=2)[0],
        settings=ScalingSettings(batch_size=64, replicas=(2,), warm_up=1, epochs=epochs),
    )


@pytest.mark.workers
def test_the_process_s_own_error_comes_back_with_the_configuration(make, tmp_path: Path):
    with pytest.raises(DataError, match=r"no-such-folder' does not exist; .* \(while measuring '1 device'\)"):
        run_trial(trial(make, data=tmp_path / "no-such-folder"))


@pytest.mark.workers
def test_a_device_that_is_not_there_is_an_error_and_no_traceback(make, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="unknown device 'cpu:7'"):
        run_trial(trial(make, devices="cpu:0,cpu:7"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.workers
def test_ctrl_c_ends_the_process_in_silence(make, capfd: pytest.CaptureFixture[str]):
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_trial(trial(make, epochs=10_000))
    timer.join()

    assert capfd.readouterr() == ("", "")
