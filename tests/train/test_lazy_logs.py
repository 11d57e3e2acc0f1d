"""LazyLogs: a dict of floats to everyone, read at the first look at a value and not before."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lockstep.train.logs import LazyLogs, copy_logs

NUMBERS = {"loss": 0.5, "accuracy": 0.25}


class Device:
    """Gives the numbers, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def read(self) -> Mapping[str, float]:
        self.asked += 1
        return NUMBERS

    def logs(self) -> LazyLogs:
        return LazyLogs(list(NUMBERS), self.read, lambda: False)


def changed(logs: dict[str, float], act: Callable[[dict[str, float]], Any]) -> dict[str, float]:
    act(logs)
    return dict(logs)


@pytest.mark.parametrize(
    "look",
    [
        lambda logs: logs["loss"],
        lambda logs: logs.get("loss"),
        lambda logs: list(logs.values()),
        lambda logs: list(logs.items()),
        lambda logs: dict(logs),
        lambda logs: {**logs},
        lambda logs: {**logs, "epoch": 1},
        lambda logs: logs | {"epoch": 1.0},
        lambda logs: {"epoch": 1.0} | logs,
        lambda logs: logs.copy(),
        lambda logs: copy.copy(logs),
        lambda logs: copy.deepcopy(logs),
        lambda logs: pickle.loads(pickle.dumps(logs)),
        lambda logs: json.dumps(logs),
        lambda logs: repr(logs),
        lambda logs: "{loss:.2f} {accuracy}".format(**logs),
        lambda logs: logs == NUMBERS,
        lambda logs: logs != NUMBERS,
        lambda logs: changed(logs, lambda each: each.update(loss=1.0)),
        lambda logs: changed(logs, lambda each: each.__setitem__("loss", 1.0)),
        lambda logs: changed(logs, lambda each: each.__delitem__("loss")),
        lambda logs: changed(logs, lambda each: each.pop("loss")),
        lambda logs: changed(logs, lambda each: each.popitem()),
        lambda logs: changed(logs, lambda each: each.setdefault("loss", 9.0)),
        lambda logs: changed(logs, lambda each: each.clear()),
        lambda logs: changed(logs, lambda each: each.__ior__({"loss": 1.0})),
    ],
)
def test_it_is_a_dict_to_whoever_looks_at_a_value(look: Callable[[dict[str, float]], Any]):
    device = Device()
    assert look(device.logs()) == look(dict(NUMBERS))
    assert device.asked == 1


def test_names_are_known_without_a_read_and_copies_are_read_by_themselves():
    device = Device()
    logs = device.logs()

    assert (len(logs), list(logs), list(logs.keys()), "loss" in logs, bool(logs)) == (
        2,
        [*NUMBERS],
        [*NUMBERS],
        True,
        True,
    )
    assert device.asked == 0
    assert not logs.arrived
    first, second = copy_logs(logs), copy_logs(logs)
    first["loss"] = 1.0
    assert (first["loss"], second["loss"]) == (1.0, 0.5)
    assert isinstance(second, LazyLogs)
    assert second.arrived
    assert not logs.arrived
    assert (copy_logs(NUMBERS), copy_logs(None)) == (NUMBERS, {})
