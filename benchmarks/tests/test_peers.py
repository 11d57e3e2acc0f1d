from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.frameworks import PEERS, Places, contenders_of, settings_of
from benchmarks.programs import Program

ROOT = Path(__file__).parents[2]
PLACES = Places(environments=Path("environments"), programs=ROOT / "benchmarks" / "peers")
NAMES = [peer.name for peer in PEERS]


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==", 1) for line in lines)  # a line without "==" fails here


@pytest.mark.parametrize("name", NAMES)
def test_each_environment_is_pinned_and_has_what_is_told(name: str):
    (peer,) = (peer for peer in PEERS if peer.name == name)
    pinned = {package.replace("_", "-") for package in pins(PLACES.programs / f"{name}.txt")}

    assert set(peer.packages) <= pinned
    assert (PLACES.programs / peer.script).exists()


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_the_torch_peers_have_the_versions_that_we_have(name: str):
    ours = pins(ROOT / "constraints.txt")
    theirs = pins(PLACES.programs / f"{name}.txt")

    assert {package: theirs[package] for package in ("torch", "transformers", "numpy")} == {
        package: ours[package] for package in ("torch", "transformers", "numpy")
    }


def test_keras_is_the_same_on_both_backends():
    on_tensorflow, on_jax = (pins(PLACES.programs / f"{name}.txt") for name in ("tensorflow", "jax"))

    assert (on_tensorflow["keras"], on_tensorflow["numpy"]) == (on_jax["keras"], on_jax["numpy"])


@pytest.mark.parametrize("workload", ["mobilenetv2", "mlm"])
def test_every_peer_has_a_contender_of_two_replicas_that_says_its_settings(workload: str):
    contenders = [contender for peer in PEERS for contender in contenders_of(peer, workload, PLACES)]

    assert {contender.peer for contender in contenders if contender.shares == 2} == set(NAMES)
    assert len({contender.name for contender in contenders}) == len(contenders)
    assert all(contender.settings and contender.role == "peer" for contender in contenders)


def test_a_contender_runs_its_program_in_its_environment():
    contender = contenders_of(PEERS[0], "mobilenetv2", PLACES)[0]

    assert isinstance(contender.launcher, Program)
    assert contender.launcher.python == Path("environments/accelerate/bin/python")
    assert contender.launcher.script == PLACES.programs / "train_accelerate.py"
    assert (contender.processes, contender.shares, contender.layout) == (2, 2, "channels_last")


def test_no_peer_knows_the_workload_that_tries_the_harness():
    assert [settings_of(name, "linear") for name in NAMES] == [[], [], [], []]
