from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.frameworks import PEERS, Places, versions_of
from benchmarks.suites.cpu import line_up, roster
from lockstep.errors import ConfigError

PROGRAMS = Path(__file__).parents[1] / "peers"
FABRIC, TENSORFLOW = PEERS[1], PEERS[2]


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


def test_without_peers_the_roster_takes_part(places: Places):
    lineup = line_up(["mlm"], peers="no", places=places)

    assert lineup.contenders == {"mlm": list(roster("mlm"))}
    assert (lineup.absences, lineup.versions) == ((), {})


def test_peers_come_before_the_checks(places: Places, monkeypatch):
    monkeypatch.setattr("benchmarks.suites.cpu.versions_of", lambda peer, places: f"{peer.name} 1")
    lineup = line_up(["mlm"], peers="also", places=places)

    assert names(lineup.contenders["mlm"])[-9:] == [
        "accelerate-2",
        "fabric-2",
        "tensorflow-2",
        "tensorflow-4",
        "tensorflow-1",
        "jax-2",
        "lockstep-2 fit",
        "single keeping",
        "ddp-2 keeping",
    ]
    assert lineup.versions["jax"] == "jax 1"
    only = line_up(["mlm"], peers="only", places=places).contenders["mlm"]
    assert {contender.role for contender in only} == {"peer"}


def test_the_torch_peers_try_both_memory_formats(places: Places, monkeypatch):
    monkeypatch.setattr("benchmarks.suites.cpu.versions_of", lambda peer, places: "")
    lineup = line_up(["mobilenetv2"], peers="only", places=places)

    assert names(lineup.contenders["mobilenetv2"])[:4] == [
        "accelerate-2 channels_last",
        "accelerate-2",
        "fabric-2 channels_last",
        "fabric-2",
    ]


def test_who_is_not_there_is_absent_with_a_reason(tmp_path: Path):
    lineup = line_up(["mlm", "linear"], peers="also", places=Places(environments=tmp_path, programs=PROGRAMS))

    assert lineup.contenders["mlm"] == list(roster("mlm"))
    assert {absence.workload for absence in lineup.absences} == {"mlm"}  # no peer knows the workload linear
    expected = f"{tmp_path}/accelerate/bin/python is not there; make bench SUITE=peers"
    assert lineup.absences[0].reason.startswith(expected)


def test_the_versions_are_the_environments_own(places: Places):
    with pytest.raises(ConfigError, match=r"lacks a package: .*tensorflow-cpu; remove its folder"):
        versions_of(TENSORFLOW, places)


def test_a_missing_program_is_told(places: Places, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train_fabric\.py is not there"):
        versions_of(FABRIC, Places(environments=places.environments, programs=tmp_path))


def test_only_names_peers_too(places: Places, monkeypatch):
    monkeypatch.setattr("benchmarks.suites.cpu.versions_of", lambda peer, places: "")
    lineup = line_up(["mlm"], peers="also", places=places, only=["jax-2", "lockstep-2"])

    assert names(lineup.contenders["mlm"]) == ["lockstep-2", "jax-2"]
    with pytest.raises(ConfigError, match="--only tpu is unknown; choose from 'accelerate-2'"):
        line_up(["mlm"], peers="only", places=places, only=["tpu"])
