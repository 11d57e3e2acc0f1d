"""Addresses are taken apart and put together, and every malformed one is shown beside a right example."""

from __future__ import annotations

import pytest

from lockstep.cluster.spec import canonical, join_address, parse_address, shown
from lockstep.errors import ClusterError


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("hosta:20000", ("hosta", 20000)),
        ("worker-0.jobs.svc.cluster.local:1", ("worker-0.jobs.svc.cluster.local", 1)),
        ("my_box:65535", ("my_box", 65535)),
        ("10.0.0.1:2000", ("10.0.0.1", 2000)),
        ("[::1]:2000", ("::1", 2000)),
        ("[fe80::1%eth0]:2000", ("fe80::1%eth0", 2000)),
        ("a:2000", ("a", 2000)),
    ],
)
def test_host_and_port(address: str, parts: tuple[str, int]):
    assert parse_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (7, r"7 is not an address; write text such as 'hosta:20000'"),
        (None, r"None is not an address"),
        ("", r"'' lacks a port; write 'hosta:20000'"),
        ("hosta", r"'hosta' lacks a port"),
        (":20000", r"':20000' lacks a host"),
        ("hosta:", r"'hosta:' has no port from 1 to 65535 after its last colon"),
        ("hosta:http", r"'hosta:http' has no port"),
        ("hosta:0", r"'hosta:0' has no port from 1 to 65535"),
        ("hosta:65536", r"'hosta:65536' has no port from 1 to 65535"),
        ("hosta:-1", r"'hosta:-1' has no port"),
        ("hosta:2000 ", r"'hosta:2000 ' has no port"),
        ("hosta:" + "9" * 5000, r"'hosta:9{100,114}\.\.\. has no port"),
        ("hosta:٣", r"has no port"),
        ("http://hosta:20000", r"looks like a URL; write host and port alone, such as 'hosta:20000'"),
        ("hosta/20000", r"looks like a URL"),
        ("host a:20000", r"'host a:20000' has no host name before its colon"),
        (" hosta:20000", r"' hosta:20000' has no host name"),
        ("-hosta:20000", r"has no host name"),
        ("hosta,hostb:20000", r"has no host name"),
        ("::1:2000", r"'::1:2000' has more than one colon; write an IPv6 address in brackets: '\[fd00::1\]:20000'"),
        ("a:1:2", r"more than one colon"),
        ("[hosta]:2000", r"'\[hosta\]:2000' has no IP address before its port \(.*\); write '\[fd00::1\]:20000'"),
        ("[]:2000", r"has no IP address"),
        ("300.1.1.1:2000", r"has no IP address before its port \(.*\); write '10.0.0.1:20000'"),
        ("10.0.0:2000", r"has no IP address"),
        ("0.0.0.0:2000", r"'0.0.0.0:2000' means every address of a host, which others cannot reach; write the one"),
        ("[::]:2000", r"means every address of a host"),
    ],
)
def test_a_malformed_address_is_shown_with_a_right_one(address: object, message: str):
    with pytest.raises(ClusterError, match=message) as caught:
        parse_address(address)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [("HostA:2000", "hosta:2000"), ("hosta.:2000", "hosta:2000"), ("a:0020", "a:20"), ("[0:0::1]:2", "[::1]:2")],
)
def test_equal_addresses_have_one_spelling(one: str, other: str):
    assert canonical(one) == canonical(other) == other


def test_what_is_long_is_cut_and_stays_on_one_line():
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown("x" * 1000)) < 130
