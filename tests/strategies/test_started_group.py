"""Strategies in a process that has a process group of torch already, as under Ray Train and with Accelerate."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import oracle
from tests.conftest import FreePorts
from tests.programs.started_group import batches, make_module
from tests.tiers import partly_slow

pytestmark = pytest.mark.workers

PROGRAM = Path(__file__).parents[1] / "programs" / "started_group.py"
LIMIT_S = 120
Python = Callable[..., Any]


def expected() -> list[float]:
    """The weights of a loop on one device."""
    module = make_module()
    oracle.train(module, batches(), partial(torch.optim.SGD, lr=0.1), torch.nn.functional.mse_loss, epochs=3)
    return [value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()]


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


def outcomes(programs: list[Any]) -> list[tuple[int, str, str]]:
    said = [program.communicate(LIMIT_S) for program in programs]
    return [(program.returncode, *lines) for program, lines in zip(programs, said, strict=True)]


@pytest.mark.parametrize("kind", partly_slow(["mirrored", "tensor"], "mirrored"))
@pytest.mark.parametrize("declared", partly_slow(["by variables", "by the group alone"], "by the group alone"))
def test_the_group_says_who_this_is_and_where_the_others_are(
    python: Python, free_ports: FreePorts, kind: str, declared: str
):
    (port,) = free_ports(1)  # which the group's own store takes
    by_variables = declared == "by variables"
    done = outcomes(
        [
            python(
                str(PROGRAM), f"tcp://127.0.0.1:{port}", f"{rank}", "2", "gloo", kind,
                OMP_NUM_THREADS="1", **(variables(rank, 2, port) if by_variables else {}),
            )
            for rank in range(2)
        ]
    )  # fmt: skip
    assert [code for code, *_ in done] == [0, 0], done
    seen = [json.loads(line) for _, line, _ in done]
    assert [numbers[:3] for numbers in seen] == [[0, 2, 2.0], [1, 2, 2.0]]
    first, second = seen[0][3:]
    assert first == second == seen[1][3] == seen[1][4] == pytest.approx(expected(), rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_accelerate_s_group(python: Python, free_ports: FreePorts):
    (port,) = free_ports(1)
    words = (str(PROGRAM), "none")
    programs = [
        python(*words, f"{rank}", "2", "accelerate", "tensor", OMP_NUM_THREADS="1", **variables(rank, 2, port))
        for rank in range(2)
    ]
    done = outcomes(programs)
    assert [code for code, *_ in done] == [0, 0], done
    assert all(json.loads(line)[3] == pytest.approx(expected(), rel=1e-5, abs=1e-6) for _, line, _ in done)


REFUSED = {
    "of another size": (
        ["tcp://127.0.0.1:{port}", "0", "1", "gloo"],
        {"RANK": "0", "WORLD_SIZE": "2"},
        "torch's process group makes this process 0 of 1, and torchrun declares worker 0 of 2; make the group and",
    ),
    "with another rank": (
        ["tcp://127.0.0.1:{port}", "0", "1", "gloo"],
        {"TF_CONFIG": json.dumps({"cluster": {"worker": ["h:1", "i:1"]}, "task": {"type": "worker", "index": 1}})},
        "torch's process group makes this process 0 of 1, and TF_CONFIG declares worker 1 of 2",
    ),
    "of a backend whose store keeps nothing": (
        ["none", "0", "2", "fake"],
        {"RANK": "0", "WORLD_SIZE": "2"},
        "torch's process group (fake) is there, and the store that it was made with does not pass on an address",
    ),
    "without an address": (
        ["none", "0", "2", "fake"],
        {},
        "torch's process group (fake) makes this process 0 of 2, and neither its store nor a variable names the host",
    ),
}


@pytest.mark.parametrize("group", partly_slow(REFUSED, "without an address", "with another rank"))
def test_a_group_is_refused_in_one_line(python: Python, free_ports: FreePorts, group: str):
    words, described, message = REFUSED[group]
    port, other = free_ports(2)
    if "RANK" in described:
        described = described | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{other}"}
    program = python(str(PROGRAM), *(word.format(port=port) for word in words), OMP_NUM_THREADS="1", **described)
    ((code, printed, said),) = outcomes([program])
    assert code == 1
    assert not printed
    last = said.strip().splitlines()[-1].removeprefix("[rank0]: ")  # torch's, of processes that have a group
    assert last.startswith("lockstep.errors.ClusterError: ")
    assert message in last
