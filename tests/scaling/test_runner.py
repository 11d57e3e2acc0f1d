"""A process that fails: the error is its own, the name is the configuration's."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.scaling.configurations import ScalingSettings
from lockstep_tools.scaling.recipes import RECIPES
from lockstep_tools.scaling.runner import run_trial


@pytest.mark.workers
def test_the_process_s_own_error_comes_back_and_no_traceback(make, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    config = ImagesConfig(data=tmp_path / "no-such-folder", workers=0, width_multiplier=0.1)
    settings = ScalingSettings(batch_size=64, replicas=(2,), warm_up=1)
    with pytest.raises(DataError, match=r"no-such-folder' does not exist.* \(while measuring '1 device'\)"):
        run_trial(RECIPES["images"], config, "cpu:2", make.plan(2, cores=2, devices=2)[0], settings)
    assert capfd.readouterr() == ("", "")
