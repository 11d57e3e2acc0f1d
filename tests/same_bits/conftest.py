"""The same trainings on several layouts of the same replicas, each in processes of its own."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lockstep as ls

PROGRAM = Path(__file__).parent / "programs" / "trainings.py"
LIMIT_S = 200.0

State = Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What one layout came to.

    Attributes:
        states: for each training, the state after every step, of all workers together.
        results: for each training, what the chief found in the end.
    """

    states: Mapping[str, list[State]]
    results: Mapping[str, Any]

    def differences(self, other: Outcome) -> dict[str, str]:
        """For each training whose bits differ: the first step at which they do, and which parts of the state.

        Of the other, the last steps count, as many as this one has.
        """
        assert self.states.keys() == other.states.keys()
        found = {name: _first_difference(own, other.states[name][-len(own) :]) for name, own in self.states.items()}
        return {name: where for name, where in found.items() if where}


def _first_difference(states: list[State], others: list[State]) -> str:
    for step, (one, other) in enumerate(zip(states, others, strict=True)):
        parts = sorted(part for part in one.keys() | other.keys() if one.get(part) != other.get(part))
        if parts:
            return f"step {step}: {', '.join(parts)}"
    return ""


RunLayout = Callable[..., Outcome]


@pytest.fixture(scope="session")
def trainings() -> Any:
    """What ``programs/trainings.py`` defines."""
    return SimpleNamespace(**runpy.run_path(str(PROGRAM), run_name="trainings"))


@pytest.fixture(scope="module")
def run_layout() -> RunLayout:
    """``run_layout((1, 2), (2, 2), "loops")``: runs trainings once a session.

    It is given the devices of each worker, the replicas that each must get, which trainings, and the folder of the one
    that is backed up.
    """

    @cache
    def run(devices: tuple[int, ...], replicas: tuple[int, ...], kind: str, backup: str = "") -> Outcome:
        arguments = (str(PROGRAM), kind, sum(replicas), devices, backup)
        found = ls.launch(job, workers=len(devices), args=arguments, timeout_s=LIMIT_S)
        assert found["replicas"] == replicas
        states = {name: together([each[name] for each in found["noted"]]) for name in found["results"]}
        return Outcome(states, found["results"])

    return run


def job(program: str, *arguments: Any) -> dict[str, Any]:
    """What every worker does."""
    found: dict[str, Any] = runpy.run_path(program)["run_layout"](*arguments)
    return found


def together(workers: list[list[State]]) -> list[State]:
    """The states of one training as all workers noted them, which must agree about what several of them note."""
    assert len({len(states) for states in workers}) == 1
    merged: list[State] = []
    for noted in zip(*workers, strict=True):
        state: dict[str, str] = {}
        for number, own in enumerate(noted):
            for part, digits in own.items():
                name = part
                if state.setdefault(part, digits) != digits:
                    name = f"{part}, on worker {number}"
                state[name] = digits
        merged.append(state)
    return merged
