"""The probes of ``lockstep doctor``: the known troubles, time limits, and what a report leaves out."""

from __future__ import annotations

import re
import socket
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cluster.spec import ClusterSpec
from lockstep_tools.doctor.examine import examine_in_process, run_probes
from lockstep_tools.doctor.limits import GB, Limits, read_limits
from lockstep_tools.doctor.network import cluster_troubles, examine_network, interface_addresses, local_address
from lockstep_tools.doctor.section import Fact, Section, Trouble, as_report, as_text
from lockstep_tools.doctor.software import EXTRAS, missing_packages

ROOT = Path(__file__).parents[2]
ROOMY = Limits(
    cores=8,
    usable_cores=8,
    cpu_quota=None,
    omp_threads="",
    load=0.5,
    memory=64 * GB,
    available_mb=60_000,
    memory_limit=None,
    open_files=(65_536, -1),
    shared=(32 * GB, 32 * GB),
    disk=(100 * GB, 100 * GB),
)


def test_facts_that_are_private_and_what_follows_a_semicolon_are_no_part_of_a_report():
    facts = [Fact("host", "secret", private=True), Fact("cores", "8; lockstep devices lists them")]
    troubles = [Trouble("The host 'secret' is lost.", public="A host is lost."), Trouble("Too few files.")]
    section = Section(title="network", facts=facts, troubles=troubles)
    report = as_report([Section.from_json(section.to_json())])
    assert report == "```text\nnetwork: cores 8\ntrouble: A host is lost.\ntrouble: Too few files.\n```"
    assert "The host 'secret' is lost." in as_text([section])


def test_a_probe_that_hangs_or_fails_is_a_trouble_and_the_others_are_shown():
    ended = threading.Event()

    def hang() -> Section:
        ended.wait()
        return Section(title="hangs")

    sections = run_probes(
        {"hangs": hang, "fails": lambda: examine_in_process("lockstep.nothing", 20.0), "works": _works}, 0.5
    )
    ended.set()

    assert [section.title for section in sections] == ["hangs", "fails", "works"]
    assert "longer than 0.5 s" in sections[0].troubles[0].text
    assert sections[1].troubles
    assert sections[2].facts == (Fact("a", "b"),)
    outcomes = ["examination did not end in 0.5 s", "examination failed (RuntimeError)", "a b"]
    report = as_report(sections).splitlines()
    assert report[1:4] == [f"{section.title}: {fact}" for section, fact in zip(sections, outcomes, strict=True)]
    assert "hangs\n  examination  did not end in 0.5 s\n" in as_text(sections)


def test_a_machine_on_which_every_probe_fails_is_shown_too():
    def fail() -> Section:
        raise OSError("no such file '/secret'")

    sections = run_probes({"fails": fail}, 20.0)
    assert "The fails could not be examined: OSError: no such file '/secret'." in as_text(sections)
    assert "fails: examination failed (OSError)\n" in as_report(sections)
    assert "secret" not in as_report(sections)


def _works() -> Section:
    return Section(title="works", facts=(Fact("a", "b"),))


def test_a_machine_with_room_has_no_troubles():
    assert list(ROOMY.troubles()) == []


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (replace(ROOMY, open_files=(1024, 4096)), "ulimit -n 65536"),
        (replace(ROOMY, shared=(64 * 2**20, 64 * 2**20)), r"\(/dev/shm\) is 64 MB.*--shm-size"),
        (replace(ROOMY, shared=None), "is missing"),
        (replace(ROOMY, available_mb=500.0), "500 MB of memory"),
        (replace(ROOMY, disk=(GB, 100 * GB)), "1.0 GB in this folder"),
        (replace(ROOMY, cpu_quota=2.0), "sees 8 cores.*has time for 2.*OMP_NUM_THREADS=2"),
        (replace(ROOMY, omp_threads="16"), "OMP_NUM_THREADS=16 is more than the 8 cores"),
        (replace(ROOMY, omp_threads="1"), "on one core of 8"),
        (replace(ROOMY, load=20.0), "load average is 20.0 on 8 cores.*OMP_WAIT_POLICY=passive"),
    ],
)
def test_known_troubles_say_what_to_do(limits: Limits, said: str):
    (trouble,) = limits.troubles()
    assert re.search(said, trouble.text)


def test_limits_of_control_groups_are_read(tmp_path: Path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{4 * GB}\n")
    (tmp_path / "memory.current").write_text("0\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    limits = read_limits(groups=tmp_path, shared=tmp_path / "nothing")
    assert (limits.cpu_quota, limits.memory_limit, limits.shared) == (1.5, 4 * GB, None)
    assert limits.available_mb <= 4096


def test_interfaces_have_the_address_that_others_see():
    assert "127.0.0.1" in interface_addresses()["lo"]
    assert local_address("127.0.0.1") == "127.0.0.1"


def test_a_malformed_cluster_is_a_trouble_whose_values_are_no_part_of_a_report():
    section = examine_network({"TF_CONFIG": '{"cluster": "secret"}'})
    (trouble,) = section.troubles
    assert "TF_CONFIG" in trouble.text
    assert "secret" not in as_report([section])


def test_hosts_that_others_cannot_reach_are_named(monkeypatch: pytest.MonkeyPatch):
    known = {"hosta": "127.0.1.1", "hostb": "10.0.0.2"}

    def getaddrinfo(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror
        return [(0, 0, 0, "", (known[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    cluster = ClusterSpec(workers=("hosta:20000", "hostb:20000", "hostc:20000"), index=1)

    loopback, unknown = cluster_troubles(cluster)

    assert "'hosta' of the cluster is 127.0.1.1 here" in loopback.text
    assert "'hostc' of the cluster cannot be looked up" in unknown.text


def test_all_extras_are_explained_and_what_they_lack_is_found():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = [
        'numpy>=1.26; extra == "train"',
        'tqdm>=4.66; extra == "train"',
        'pillow>=11; extra == "images"',
        'torch-lockstep[plots,train]; extra == "images"',
        "torch>=2.13",
    ]
    versions = {"numpy": "1.9.3", "pillow": "11.1"}

    assert set(EXTRAS) == set(project) - {"all", "dev", "docs"}
    assert missing_packages("images", requirements, versions.get) == ["numpy 1.26 (has 1.9.3)", "tqdm"]
