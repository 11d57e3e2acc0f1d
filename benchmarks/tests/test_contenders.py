"""The contenders of the CPU suites: our own, and the frameworks whose environments are there."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from benchmarks import frameworks
from benchmarks.frameworks import PEERS, PROGRAMS, peers_of, versions_of
from benchmarks.hosts import Link
from benchmarks.loops import memory_format
from benchmarks.programs import Program
from benchmarks.suites import compiled, steps, trainer
from benchmarks.suites.cpu import contenders_for, found_versions
from benchmarks.suites.workers import on_one_host, on_two_hosts
from lockstep.errors import ConfigError

ROOT = Path(__file__).parents[2]
SLOW = Link(mbit=1000.0)


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Environments whose interpreter is this one, which has some of the frameworks' packages at most."""
    for peer in PEERS:
        folder = tmp_path / peer / "bin"
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
    monkeypatch.setattr(frameworks, "ENVIRONMENTS", tmp_path)
    return tmp_path


def names(contenders) -> list[str]:
    return [contender.name for contender in contenders]


def test_baselines_try_both_memory_formats_where_there_are_convolutions():
    ours = ["lockstep-2", "lockstep-4", "half alone", "halves together"]

    assert names(contenders_for("mobilenetv2")) == [
        *(*ours, "single channels_last", "single", "ddp-2 channels_last", "ddp-2", "ddp-4 channels_last", "ddp-4")
    ]
    assert names(contenders_for("mlm")) == [*ours, "single", "ddp-2", "ddp-4"]


def test_contenders_can_be_pickled_for_a_process():
    for contender in (
        *contenders_for("mobilenetv2"),
        *on_one_host("mlm"),
        *on_two_hosts("mobilenetv2", SLOW),
        *trainer.contenders(8),
        *compiled.contenders("mobilenetv2", bf16=True),
        *peers_of("mlm"),
        *steps.contenders("width-64"),
        *steps.contenders("blocks"),
        *steps.contenders("import"),
    ):
        assert pickle.loads(pickle.dumps(contender)).name == contender.name


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


def test_the_original_trainer_runs_alone_and_in_processes_as_torchrun_starts_them_and_tuned():
    assert names(trainer.contenders(2)) == ["lockstep-1", "lockstep-2", "lockstep-4", "trainer", "trainer ddp-2"]
    assert names(trainer.contenders(8))[-2:] == ["trainer ddp-2", "trainer ddp-2 tuned"]
    threads = [one.launcher.body.keywords["threads"] for one in trainer.contenders(8) if one.role == "baseline"]
    assert threads == [8, 1, 4]


def test_a_framework_that_is_not_there_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frameworks, "ENVIRONMENTS", tmp_path)
    versions, missing = found_versions(["jax"])

    assert versions == {}
    assert missing["jax"].startswith(f"{tmp_path}/jax/bin/python is not there; make bench SUITE=peers")
    assert "; make bench SUITE=steps makes the environments" in found_versions(["lightning"])[1]["lightning"]


@pytest.mark.usefixtures("environments")
def test_the_versions_are_the_environments_own():
    with pytest.raises(ConfigError, match=r"lacks a package: .*tensorflow-cpu; remove its folder"):
        versions_of("tensorflow")


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==", 1) for line in lines)  # a line without "==" fails here


@pytest.mark.parametrize("name", PEERS)
def test_each_environment_is_pinned_and_has_the_packages_that_are_reported(name: str):
    pinned = {package.replace("_", "-") for package in pins(PROGRAMS / f"{name}.txt")}

    assert set(PEERS[name]) <= pinned
    assert list(PROGRAMS.glob(f"*_{name}.py"))


def test_the_environments_have_the_same_versions():
    ours = pins(ROOT / "constraints.txt")
    for name in ("accelerate", "fabric", "lightning"):
        theirs = pins(PROGRAMS / f"{name}.txt")
        assert all(theirs[each] == ours[each] for each in ("torch", "transformers", "numpy") if each in theirs)
    on_tensorflow, on_jax = (pins(PROGRAMS / f"{name}.txt") for name in ("tensorflow", "jax"))
    assert (on_tensorflow["keras"], on_tensorflow["numpy"]) == (on_jax["keras"], on_jax["numpy"])


@pytest.mark.parametrize("workload", ["mobilenetv2", "mlm"])
def test_every_framework_has_a_contender_of_two_replicas_with_its_settings(workload: str):
    contenders = peers_of(workload)

    assert {contender.peer for contender in contenders if contender.replicas == 2} == set(PEERS) - {"lightning"}
    assert len({contender.name for contender in contenders}) == len(contenders)
    assert all(contender.settings and contender.role == "peer" for contender in contenders)
    assert peers_of("linear") == []


def test_a_contender_runs_its_program_in_its_environment(environments: Path):
    contender = peers_of("mobilenetv2")[0]

    assert isinstance(contender.launcher, Program)
    assert contender.launcher.python == environments / "accelerate/bin/python"
    assert contender.launcher.script == PROGRAMS / "train_accelerate.py"
    assert (contender.name, contender.processes, contender.replicas) == ("accelerate-2 channels_last", 2, 2)
