"""Workers that were started by hand on one host divide its cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.workers, pytest.mark.slow]

LIMIT_S = 120.0
PROGRAM = """
import sys, torch, lockstep as ls
strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=0)
print(torch.get_num_threads(), strategy.run(torch.get_num_threads))
strategy.close()
"""


@pytest.mark.parametrize("told", [False, True])
def test_workers_by_tf_config_divide_the_cores_unless_they_are_told_a_number(
    told: bool, free_ports: Callable[[int], list[int]], tmp_path: Path
):
    whole = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    variables = {"OMP_NUM_THREADS": whole.stdout.strip()} if told else {}
    addresses = [f"localhost:{port}" for port in free_ports(2)]
    processes = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment |= {"TF_CONFIG": json.dumps(task), **variables}
        words = [sys.executable, "-c", PROGRAM]
        processes.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path))
    printed = [process.communicate(timeout=LIMIT_S)[0].split() for process in processes]

    each = int(whole.stdout) if told else max(1, int(whole.stdout) // 2)
    assert printed == [[str(each)] * 2] * 2
