"""SLURM's notation for hosts: what it expands to, and that nothing else is taken for it."""

from __future__ import annotations

import pytest

from lockstep.cluster.slurm import expand_hosts
from lockstep.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("hosta", ["hosta"]),
        ("hosta,hostb", ["hosta", "hostb"]),
        ("hosta,hosta", ["hosta", "hosta"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[01-03,07],other", ["node01", "node02", "node03", "node07", "other"]),
        ("node[08-10]", ["node08", "node09", "node10"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("node[3,1]", ["node3", "node1"]),
        ("a[0-1]b[2,4]", ["a0b2", "a0b4", "a1b2", "a1b4"]),
        ("n[1-2].cluster.org,x-y", ["n1.cluster.org", "n2.cluster.org", "x-y"]),
        ("ip-26-0-129-85,ip-26-0-137-[14-15,22]", ["ip-26-0-129-85"] + [f"ip-26-0-137-{n}" for n in (14, 15, 22)]),
        (" hosta,hostb\n", ["hosta", "hostb"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_what_a_list_stands_for(text: str, hosts: list[str]):
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "'its end'"),
        (",", "','"),
        ("hosta,", "'its end'"),
        ("hosta,,hostb", "',hostb'"),
        ("node[1-3", r"'\[1-3'"),
        ("node1-3]", r"'\]'"),
        ("node[]", "''"),
        ("node[1-]", "'1-'"),
        ("node[-3]", "'-3'"),
        ("node[3-1]", "'3-1'"),
        ("node[a-b]", "'a-b'"),
        ("node[1,,2]", "''"),
        ("node[[1-2]]", r"'\[\[1-2\]\]'"),
        ("node[1-99999]", "'1-99999'"),
        ("node[0-9999999999999]", "'0-9999999999999'"),
        ("host a", "' a'"),
    ],
)
def test_what_is_no_list_is_shown_at_the_place(text: str, part: str):
    with pytest.raises(ClusterError, match=rf" is no list of hosts, at {part}; for example 'node\[01-03,07\],login1'"):
        expand_hosts(text)


def test_a_list_without_end_is_not_expanded():
    with pytest.raises(ClusterError, match=r"'a\[0-9999\]b\[0-9999\]' names more than 65536 hosts"):
        expand_hosts("a[0-9999]b[0-9999]")
