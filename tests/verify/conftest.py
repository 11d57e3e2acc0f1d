"""Programs in ``programs`` are verified in processes of their own; one verification of each serves all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from lockstep_tools.verify.config import Program, VerifyConfig
from lockstep_tools.verify.report import VerifyReport, verify

PROGRAMS = Path(__file__).parent / "programs"
Verified = Callable[..., VerifyReport]


@cache
def _verified(name: str, arguments: tuple[str, ...], devices: str | None, steps: int) -> VerifyReport:
    program = Program(name=f"{name}.py", target=str(PROGRAMS / f"{name}.py"), arguments=arguments)
    return verify(VerifyConfig(program=program, devices=devices, steps=steps, timeout_s=100))


@pytest.fixture(scope="session")
def verified() -> Iterator[Verified]:
    """``verified("dropout")``: the report on a program, made once."""

    def report(name: str, *arguments: str, devices: str | None = "cpu:2", steps: int = 3) -> VerifyReport:
        return _verified(name, arguments, devices, steps)

    yield report
    _verified.cache_clear()
