from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lockstep.collectives.per_replica import PerReplica, merge, select
from lockstep.errors import ConfigError


class Pair(NamedTuple):
    a: object
    b: object


@dataclass
class Held:
    """Equal to another that holds an equal value."""

    value: object


def test_a_per_replica_is_a_sequence_of_its_values():
    values = PerReplica([3, 5])
    assert values.values == (3, 5)
    assert (len(values), list(values), values[1]) == (2, [3, 5], 5)
    assert repr(values) == "PerReplica(\n  0: 3\n  1: 5\n)"


@pytest.mark.parametrize(("values", "message"), [("ab", "got str"), (7, "got int"), ([], "got no values")])
def test_a_per_replica_needs_a_list_of_values(values: object, message: str):
    with pytest.raises(ConfigError, match=message):
        PerReplica(values)  # type: ignore[arg-type]


def test_select_looks_into_every_kind_of_structure():
    inner = PerReplica(["zero", "one"])
    structure = (inner, [inner, {"key": inner}], Pair(inner, "plain"), None)
    assert select(structure, 1, 2) == ("one", ["one", {"key": "one"}], Pair("one", "plain"), None)


def test_select_leaves_other_objects_alone():
    tensor = torch.ones(2)
    assert select((tensor,), 0, 2)[0] is tensor


def test_select_refuses_another_number_of_values():
    with pytest.raises(ConfigError, match="has 2 values, but the strategy has 3 replicas"):
        select([PerReplica([1, 2])], 0, 3)


def test_merge_gives_per_replica_leaves():
    merged = merge([{"loss": 1.5, "rest": (2.5,)}, {"loss": 3.5, "rest": (4.5,)}])
    assert merged["loss"].values == (1.5, 3.5)
    assert merged["rest"][0].values == (2.5, 4.5)


def test_the_very_same_object_comes_back_bare():
    shared = torch.ones(2)
    merged = merge([(shared, None), (shared, None)])
    assert merged[0] is shared
    assert merged[1] is None


def test_equal_values_of_two_objects_do_not_come_back_bare():
    assert isinstance(merge([torch.ones(2), torch.ones(2)]), PerReplica)


def apart(value: object) -> object:
    """An equal object of its own, where Python makes one."""
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize(
    "value",
    [
        *(5, 1000, -(10**20), True, None, "text", "", "not an identifier", b"bytes", b""),
        *(0.0, 1.5, float("nan"), float("inf"), 2 + 0.5j, frozenset(), frozenset({"a"}), range(3)),
        *(torch.float32, torch.device("cpu"), np.bool_(True), np.int64(7), np.float64(0.25)),
    ],
    ids=repr,
)
def test_equal_plain_values_come_back_bare_whether_or_not_python_has_one_object_for_them(value: object):
    merged = merge([value, apart(value), apart(value)])
    assert type(merged) is type(value)
    assert merged == value or merged != merged


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", b"1"),
        (5, 6),
        (1000, 1001),
        (1.5, 2.5),
        (complex(0, 0.0), complex(0, -0.0)),
    ],
    ids=repr,
)
def test_values_of_another_type_or_other_bits_do_not(first: object, second: object):
    assert merge([first, second]).values == (first, second)


@pytest.mark.parametrize("make", [lambda: np.ones(2), lambda: torch.ones(()), object, list, lambda: torch.tensor([])])
def test_objects_go_by_identity(make: Callable[[], object]):
    first, second = Held(make()), Held(make())
    assert isinstance(merge([first, second]), PerReplica)
    assert merge([first, first]) is first
    if not isinstance(first.value, list):
        assert isinstance(merge([first.value, second.value]), PerReplica)
        assert merge([first.value, first.value]) is first.value


def test_differing_structures_become_one_per_replica():
    assert merge([None, (1, 2)]).values == (None, (1, 2))
    assert merge([{"a": 1}, {"b": 1}]).values == ({"a": 1}, {"b": 1})


def test_merge_undoes_select():
    structure = {"x": PerReplica([1.5, 2.5, 3.5]), "y": [PerReplica(["a", "b", "c"])]}
    merged = merge([select(structure, replica, 3) for replica in range(3)])
    assert merged["x"].values == (1.5, 2.5, 3.5)
    assert merged["y"][0].values == ("a", "b", "c")
