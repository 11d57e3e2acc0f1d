"""Addresses are taken apart and put together, and every malformed one is shown beside a right example."""

from __future__ import annotations

import pytest

from lockstep.checks import shown
from lockstep.cluster.spec import canonical, join_address, parse_address
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
        *(
            (address, r"is not an address; write a host and a port from 1 to 65535, such as 'hosta:20000'")
            for address in (
                *(None, 2, "", "hosta", ":20000", "hosta:", "hosta:http", "hosta:0", "hosta:65536", "hosta:-1"),
                *("hosta:2000 ", "hosta:" + "9" * 5000, "hosta:\u0663", "http://hosta:20000", "hosta/20000"),
                *("host a:20000", " hosta:20000", "-hosta:20000", "hosta,hostb:20000", "::1:2000", "a:1:2", "[]:2000"),
            )
        ),
        ("[hosta]:2000", r"'\[hosta\]:2000' is not an address"),
        ("[::x]:2000", r"'\[::x\]:2000' has no IP address before its port \(.*\)"),
        ("[10.0.0.1]:2000", r"is not an address"),
        *((f"{host}:2000", "has no IP address") for host in ("0x7f000001", "0x7f.0.0.1", "127.1", "010.0.0.1")),
        ("300.1.1.1:2000", r"has no IP address before its port \(.*\)"),
        ("10.0.0:2000", r"has no IP address"),
        ("0.0.0.0:2000", r"'0.0.0.0:2000' means every address of a host, which others cannot reach; write the"),
        *((f"{host}:2000", r"means every address of a host") for host in ("[::]", "[::ffff:0.0.0.0]")),
        *((f"{host}:2000", r"means many hosts") for host in ("255.255.255.255", "224.0.0.1", "[ff02::1]")),
    ],
)
def test_a_malformed_address_is_shown_with_a_right_one(address: object, message: str):
    with pytest.raises(ClusterError, match=message) as caught:
        parse_address(address)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("HostA:2000", "hosta:2000"),
        ("hosta.:2000", "hosta:2000"),
        ("a:0020", "a:20"),
        ("[0:0::1]:2", "[::1]:2"),
        ("[::ffff:10.0.0.1]:2", "10.0.0.1:2"),
    ],
)
def test_equal_addresses_have_one_spelling(one: str, other: str):
    assert canonical(one) == canonical(other) == other


def test_what_is_long_is_cut_and_stays_on_one_line():
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown("x" * 1000)) < 130
