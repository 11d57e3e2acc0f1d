from __future__ import annotations

import pytest

from lockstep.errors import ConfigError
from lockstep_tools.scaling.configurations import ScalingSettings, parse_replicas, usual_replicas


@pytest.mark.parametrize("name", ["batch_size", "steps", "warm_up", "rounds"])
def test_less_than_one_of_anything_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name}=0 was given, expected at least 1"):
        ScalingSettings(**{"batch_size": 8, "replicas": (2,), name: 0})


@pytest.mark.parametrize("replicas", [(), (0, 2), (-1,)])
def test_no_replicas_are_refused(replicas: tuple[int, ...]):
    with pytest.raises(ConfigError, match="expected numbers of at least 1, such as 2,4"):
        ScalingSettings(batch_size=8, replicas=replicas)


def test_a_batch_smaller_than_the_replicas_is_refused():
    with pytest.raises(ConfigError, match=r"a total batch of 3 leaves some of 4 .* raise --batch-size to at least 4"):
        ScalingSettings(batch_size=3, replicas=(2, 4))


@pytest.mark.parametrize(
    ("devices", "replicas"), [(2, (2,)), (3, (2, 3)), (4, (2, 4)), (6, (2, 4, 6)), (8, (2, 4, 8)), (1, (1,))]
)
def test_the_usual_replicas_are_powers_of_two_and_all(devices: int, replicas: tuple[int, ...]):
    assert usual_replicas(devices) == replicas


def test_replicas_are_read_from_text():
    assert parse_replicas("1,2, 4") == (1, 2, 4)
    with pytest.raises(ConfigError, match="--replicas '2;4' cannot be read; write numbers with commas between"):
        parse_replicas("2;4")
