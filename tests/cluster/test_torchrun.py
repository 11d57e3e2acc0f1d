"""torchrun's variables, whole and in part; and those of torch's own elastic agent, which must stay as they are here."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server import local_elastic_agent

from lockstep.cluster.environment import parse_torchrun
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError

PLAIN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "hosta", "MASTER_PORT": "29500"}
AGENT = {
    **PLAIN,
    "LOCAL_RANK": "1",
    "TORCHELASTIC_RUN_ID": "flowers",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_four_variables_are_a_cluster():
    cluster = parse_torchrun(PLAIN)
    assert cluster == ClusterSpec(workers=("hosta:29500", "", ""), index=1, source="torchrun")
    assert cluster.job_id == parse_torchrun({**PLAIN, "RANK": "0"}).job_id  # type: ignore[union-attr]


def test_the_agent_adds_the_id_the_attempt_and_the_store():
    assert parse_torchrun(AGENT) == ClusterSpec(
        workers=("hosta:29500", "", ""), index=1, job_id="flowers", source="torchrun", attempt=2, store_is_served=True
    )


@pytest.mark.parametrize("served", ["False", "", "true"])
def test_the_store_is_served_only_where_torch_would_think_so(served: str):
    cluster = parse_torchrun({**AGENT, "TORCHELASTIC_USE_AGENT_STORE": served})
    assert not cluster.store_is_served


def test_the_agent_sets_these_very_variables():
    text = Path(local_elastic_agent.__file__).read_text()
    assert [name for name in AGENT if f'"{name}"' not in text] == []


def test_a_run_without_an_id_gets_a_derived_one():
    unnamed, plain = parse_torchrun({**AGENT, "TORCHELASTIC_RUN_ID": "none"}), parse_torchrun(PLAIN)
    assert unnamed.job_id == plain.job_id


def test_an_id_of_ours_is_before_torchruns():
    cluster = parse_torchrun({**AGENT, "LOCKSTEP_JOB_ID": "mine"})
    assert cluster.job_id == "mine"


@pytest.mark.parametrize("host", ["fd00::1", "[fd00::1]"])
def test_an_ipv6_address_may_come_without_brackets(host: str):
    cluster = parse_torchrun({**PLAIN, "MASTER_ADDR": host})
    assert cluster.chief_address == ("fd00::1", 29500)


def test_a_single_worker_needs_no_address():
    assert parse_torchrun({"RANK": "0", "WORLD_SIZE": "1"}) == ClusterSpec(workers=("",), index=0, source="torchrun")


@pytest.mark.parametrize("environment", [{}, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, {"RANK": "", "WORLD_SIZE": ""}])
def test_nothing_is_declared(environment: dict[str, str]):
    assert parse_torchrun(environment) is None


@pytest.mark.parametrize("missing", [*PLAIN, ("RANK", "MASTER_PORT"), ("MASTER_ADDR", "MASTER_PORT")])
def test_an_incomplete_set_names_what_is_missing(missing: str | tuple[str, ...]):
    names = (missing,) if isinstance(missing, str) else missing
    environment = {name: value for name, value in PLAIN.items() if name not in names}
    # RANK and WORLD_SIZE are looked for first: without them nothing is known of the rest.
    first = [name for name in names if name in ("RANK", "WORLD_SIZE")] or names
    with pytest.raises(ClusterError, match=rf"torchrun: {' '.join(first)} not set \(there is .*\); start the program"):
        parse_torchrun(environment)


def test_what_is_there_is_shown_beside_what_is_missing():
    with pytest.raises(
        ClusterError,
        match=r"^torchrun: MASTER_ADDR MASTER_PORT not set .*RANK='0' WORLD_SIZE='2'.*`lockstep run`.*MASTER_ADDR=",
    ):
        parse_torchrun({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "3"}, r"torchrun: RANK='3'; it must be a whole number from 0 to 2"),
        ({"RANK": "-1"}, r"torchrun: RANK='-1'; it must be a whole number from 0 to 2"),
        ({"RANK": "one"}, r"torchrun: RANK='one'; it must be a whole number"),
        ({"RANK": "٣"}, r"torchrun: RANK='٣'; it must be a whole number"),
        ({"WORLD_SIZE": "0"}, r"torchrun: WORLD_SIZE='0'; it must be a whole number from 1 up"),
        ({"WORLD_SIZE": "2.0"}, r"torchrun: WORLD_SIZE='2.0'; it must be"),
        ({"MASTER_PORT": "0"}, r"torchrun: MASTER_PORT='0'; it must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "70000"}, r"torchrun: MASTER_PORT='70000'; it must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "9" * 5000}, r"MASTER_PORT='9{119}\.\.\.; it must be"),
        ({"MASTER_ADDR": "host a"}, r"torchrun: MASTER_ADDR='host a' is not a host: .*is not an address"),
        ({"MASTER_ADDR": "hosta:29500"}, r"torchrun: MASTER_ADDR='hosta:29500' is not a host"),
        ({"MASTER_ADDR": "0.0.0.0"}, r"torchrun: MASTER_ADDR='0.0.0.0' is not a host: .*which others cannot reach"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, r"torchrun: TORCHELASTIC_RESTART_COUNT='x'; it must be a whole number"),
        ({"TORCHELASTIC_RUN_ID": "a\nb"}, r"torchrun: TORCHELASTIC_RUN_ID='a.*b' is not a job id"),
    ],
)
def test_a_malformed_variable_is_named(changes: dict[str, str], message: str):
    with pytest.raises(ClusterError, match=message) as caught:
        parse_torchrun({**PLAIN, **changes})
    assert "\n" not in str(caught.value)
