"""The exception tree: what a caller may catch, and that the one error of torch's family comes when asked for."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

import lockstep
from lockstep import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_one_of_ours_and_travels_between_processes(name: str):
    kind = getattr(errors, name)
    again = pickle.loads(pickle.dumps(kind("a reason")))
    assert issubclass(kind, errors.LockstepError)
    assert (type(again), str(again)) == (kind, "a reason")
    assert kind.__module__ == "lockstep.errors"


def test_running_out_of_a_share_s_memory_is_torch_s_error_too():
    assert issubclass(lockstep.errors.DeviceMemoryError, torch.OutOfMemoryError)


def test_torch_is_imported_when_that_error_is_asked_for():
    code = "import sys; from lockstep import errors; errors.ConfigError; print('torch' in sys.modules)"
    code += "; errors.DeviceMemoryError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_an_error_that_there_is_not_is_said_to_be_missing():
    with pytest.raises(AttributeError, match=r"module 'lockstep\.errors' has no attribute 'DeviceError'"):
        errors.DeviceError  # noqa: B018
