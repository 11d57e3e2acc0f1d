"""Who takes part in the CPU suites: our own contenders, and the peers whose environments are there."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from benchmarks.frameworks import PEERS, Places, contenders_of, versions_of
from benchmarks.hosts import Link
from benchmarks.loops import memory_format
from benchmarks.processes import SpawnedBody
from benchmarks.programs import Program
from benchmarks.suites import trainer
from benchmarks.suites.cpu import contenders_for, line_up
from benchmarks.suites.workers import free_name, is_halved, on_free_hosts, on_one_host, on_two_hosts
from lockstep.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "benchmarks" / "peers"
ACCELERATE, FABRIC, TENSORFLOW, _ = PEERS
NAMES = [peer.name for peer in PEERS]
SLOW = Link(mbit=1000.0)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Places where each peer's interpreter is this one, which has some of their packages at most."""
    for peer in PEERS:
        folder = tmp_path / peer.name / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
    return Places(environments=tmp_path, programs=PROGRAMS)


def names(contenders) -> list[str]:
    return [contender.name for contender in contenders]


def test_baselines_try_both_memory_formats_where_there_are_convolutions():
    ours = ["lockstep-2", "lockstep-4", "half alone", "halves together"]
    counted = {name: names(each for each in contenders_for(name) if each.counted) for name in ("mobilenetv2", "mlm")}

    assert counted["mobilenetv2"] == [
        *(*ours, "single channels_last", "single", "ddp-2 channels_last", "ddp-2", "ddp-4 channels_last", "ddp-4")
    ]
    assert counted["mlm"] == [*ours, "single", "ddp-2", "ddp-4"]
    checks = names(each for each in contenders_for("mlm") if not each.counted)
    assert checks == ["lockstep-2 fit", "single keeping", "ddp-2 keeping"]


def test_contenders_can_be_pickled_for_a_process():
    for contender in contenders_for("mobilenetv2"):
        assert pickle.loads(pickle.dumps(contender)) == contender
        assert contender.peer == ""
    for contender in (*on_one_host("mlm"), *on_two_hosts("mobilenetv2", SLOW)):
        assert pickle.loads(pickle.dumps(contender)).name == contender.name
    for contender in trainer.contenders(8):
        assert pickle.loads(pickle.dumps(contender)) == contender


def test_a_plain_loop_has_no_automatic_layout():
    with pytest.raises(ConfigError, match="layout='auto' is for our strategies; a plain loop takes one of channels_"):
        memory_format("auto")


def test_ddp_runs_as_written_and_with_what_our_strategies_choose():
    assert names(on_one_host("mobilenetv2")) == [
        *("workers-2", "ddp-2", "ddp-2 channels_last", "ddp-2 channels_last keeping")
    ]
    assert names(on_one_host("mlm")) == ["workers-2", "ddp-2", "ddp-2 keeping"]
    assert names(on_two_hosts("mobilenetv2", SLOW)) == [
        *("hosts-2x2", "hosts-2x2 bf16"),
        *("ddp-2x2", "ddp-2x2 channels_last keeping", "ddp-2x2 channels_last keeping fp16"),
    ]


def test_each_of_two_hosts_has_as_many_replicas():
    for contender in on_two_hosts("mlm", SLOW):
        assert contender.shares == 4
        assert contender.processes == (2 if contender.role == "ours" else 4)
        assert isinstance(contender.launcher, SpawnedBody)
        assert contender.launcher.link == SLOW


def test_the_free_ones_differ_by_the_link_alone():
    slowed = [one for one in on_two_hosts("mlm", SLOW) if not is_halved(one)]
    free = on_free_hosts("mlm")

    assert names(one for one in on_two_hosts("mlm", SLOW) if is_halved(one)) == [
        "hosts-2x2 bf16",
        "ddp-2x2 keeping fp16",
    ]
    assert names(free) == [free_name(one.name) for one in slowed]
    for own, unslowed in zip(slowed, free, strict=True):
        assert isinstance(unslowed.launcher, SpawnedBody)
        assert unslowed.launcher.link == Link(mbit=None)
        assert unslowed.role == "reference"
        assert unslowed.settings == own.settings


def test_the_original_trainer_runs_alone_and_under_torchrun_as_it_starts_and_tuned():
    assert names(trainer.contenders(2)) == ["lockstep-1", "lockstep-2", "lockstep-4", "trainer", "torchrun-2"]
    assert names(trainer.contenders(8))[-2:] == ["torchrun-2", "torchrun-2 tuned"]
    for one in trainer.contenders(8):
        assert one.role == ("ours" if one.name.startswith("lockstep") else "baseline")


def test_without_peers_our_contenders_take_part(places: Places):
    lineup = line_up(["mlm"], peers="no", places=places)

    assert lineup.contenders == {"mlm": list(contenders_for("mlm"))}
    assert (lineup.absences, lineup.versions) == ((), {})


def test_peers_come_before_the_checks(places: Places, monkeypatch):
    monkeypatch.setattr("benchmarks.suites.cpu.versions_of", lambda peer, places: f"{peer.name} 1")
    lineup = line_up(["mlm"], peers="also", places=places)

    assert names(lineup.contenders["mlm"])[-9:] == [
        *("accelerate-2", "fabric-2", "tensorflow-2", "tensorflow-4", "tensorflow-1", "jax-2"),
        *("lockstep-2 fit", "single keeping", "ddp-2 keeping"),
    ]
    assert lineup.versions["jax"] == "jax 1"
    only = line_up(["mlm"], peers="only", places=places).contenders["mlm"]
    assert {contender.role for contender in only} == {"peer"}


def test_the_torch_peers_try_both_memory_formats(places: Places, monkeypatch):
    monkeypatch.setattr("benchmarks.suites.cpu.versions_of", lambda peer, places: "")
    lineup = line_up(["mobilenetv2"], peers="only", places=places)

    assert names(lineup.contenders["mobilenetv2"])[:4] == [
        *("accelerate-2 channels_last", "accelerate-2", "fabric-2 channels_last", "fabric-2")
    ]


def test_who_is_not_there_is_absent_with_a_reason(tmp_path: Path):
    lineup = line_up(["mlm", "linear"], peers="also", places=Places(environments=tmp_path, programs=PROGRAMS))

    assert lineup.contenders["mlm"] == list(contenders_for("mlm"))
    assert {absence.workload for absence in lineup.absences} == {"mlm"}  # no peer knows the workload linear
    expected = f"{tmp_path}/accelerate/bin/python is not there; make bench SUITE=peers"
    assert lineup.absences[0].reason.startswith(expected)


def test_the_versions_are_the_environments_own(places: Places):
    with pytest.raises(ConfigError, match=r"lacks a package: .*tensorflow-cpu; remove its folder"):
        versions_of(TENSORFLOW, places)


def test_a_missing_program_is_a_reason(places: Places, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train_fabric\.py is not there"):
        versions_of(FABRIC, Places(environments=places.environments, programs=tmp_path))


def test_only_names_peers_too(places: Places, monkeypatch):
    monkeypatch.setattr("benchmarks.suites.cpu.versions_of", lambda peer, places: "")
    lineup = line_up(["mlm"], peers="also", places=places, only=["jax-2", "lockstep-2"])

    assert names(lineup.contenders["mlm"]) == ["lockstep-2", "jax-2"]
    with pytest.raises(ConfigError, match="--only tpu is unknown; choose from 'accelerate-2'"):
        line_up(["mlm"], peers="only", places=places, only=["tpu"])


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==", 1) for line in lines)  # a line without "==" fails here


@pytest.mark.parametrize("name", NAMES)
def test_each_environment_is_pinned_and_has_the_packages_that_are_reported(name: str):
    (peer,) = (peer for peer in PEERS if peer.name == name)
    pinned = {package.replace("_", "-") for package in pins(PROGRAMS / f"{name}.txt")}

    assert set(peer.packages) <= pinned
    assert (PROGRAMS / f"train_{name}.py").exists()


def test_the_environments_have_the_same_versions():
    ours = pins(ROOT / "constraints.txt")
    for name in ("accelerate", "fabric"):
        theirs = pins(PROGRAMS / f"{name}.txt")
        assert all(theirs[package] == ours[package] for package in ("torch", "transformers", "numpy"))
    on_tensorflow, on_jax = (pins(PROGRAMS / f"{name}.txt") for name in ("tensorflow", "jax"))
    assert (on_tensorflow["keras"], on_tensorflow["numpy"]) == (on_jax["keras"], on_jax["numpy"])


@pytest.mark.parametrize("workload", ["mobilenetv2", "mlm"])
def test_every_peer_has_a_contender_of_two_replicas_with_its_settings(workload: str, places: Places):
    contenders = [contender for peer in PEERS for contender in contenders_of(peer, workload, places)]

    assert {contender.peer for contender in contenders if contender.shares == 2} == set(NAMES)
    assert len({contender.name for contender in contenders}) == len(contenders)
    assert all(contender.settings and contender.role == "peer" for contender in contenders)


def test_a_contender_runs_its_program_in_its_environment(places: Places):
    contender = contenders_of(ACCELERATE, "mobilenetv2", places)[0]

    assert isinstance(contender.launcher, Program)
    assert contender.launcher.python == places.environments / "accelerate/bin/python"
    assert contender.launcher.script == PROGRAMS / "train_accelerate.py"
    assert (contender.processes, contender.shares, contender.layout) == (2, 2, "channels_last")
