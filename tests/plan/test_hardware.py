"""Links and what collectives take on them."""

from __future__ import annotations

import pytest

from lockstep.errors import ConfigError
from lockstep_tools.plan.hardware import LINKS, Network, parse_link, ring_seconds, send_seconds

NETWORK = Network(inside=LINKS["nvlink3"], between=LINKS["hdr"], per_host=8)


def test_a_link_is_a_name_or_numbers():
    assert parse_link("HDR") is LINKS["hdr"]
    assert (parse_link("25@3.5").bandwidth_gb_s, parse_link("25@3.5").latency_us) == (25.0, 3.5)
    assert parse_link("1.5").bandwidth_gb_s == 1.5
    with pytest.raises(ConfigError, match=r"the link 'token-ring' is not known; choose one of nvlink2.*25@14"):
        parse_link("token-ring")
    with pytest.raises(ConfigError, match="expected a bandwidth above 0"):
        parse_link("0@3")


def test_a_ring_moves_at_the_pace_of_its_slowest_link():
    inside = ring_seconds(1e9, 8, 1, NETWORK, 1.0, 0.0)
    across = ring_seconds(1e9, 16, 1, NETWORK, 1.0, 0.0)
    alone = ring_seconds(1e9, 16, 8, NETWORK, 1.0, 0.0)
    assert inside == pytest.approx(1e9 * 7 / 8 / 300e9, rel=0.02)
    assert across == pytest.approx(1e9 * 15 / 16 / 200e9, rel=0.02)  # eight rails of 25 GB/s
    assert alone == pytest.approx(1e9 * 15 / 16 / 25e9, rel=0.02)
    assert ring_seconds(1e9, 1, 1, NETWORK, 1.0, 1.0) == 0.0


def test_a_small_message_costs_its_latency():
    assert ring_seconds(8, 8, 1, NETWORK, 1.0, 8.4e-6) == pytest.approx(8.4e-6 + 7 * 3.4e-6, rel=1e-3)
    assert send_seconds(8, False, NETWORK, 1.0) == pytest.approx(14e-6, rel=1e-3)
    assert send_seconds(8, True, NETWORK, 1.0) == pytest.approx(3.4e-6, rel=1e-3)
