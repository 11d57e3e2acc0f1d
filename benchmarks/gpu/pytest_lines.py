"""A plugin of pytest: writes a line of JSON when a test begins and when it ends, so that a killed run leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_OPTION = "--lines"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file is named on the command line."""
    parser.addoption(_OPTION, type=Path, required=True, help="file that the lines are added to")


def pytest_configure(config: pytest.Config) -> None:
    """Begins to write."""
    config.pluginmanager.register(_Lines(config.getoption(_OPTION)))


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(name=nodeid, outcome="did not end")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Of a test that passes, the call alone; of others, the phase that did not.
        if report.when != "call" and report.outcome == "passed":
            return
        seen = [f"{name}: {value}" for name, value in report.user_properties] + [_why(report)]
        text = "; ".join(filter(None, seen))
        self._write(name=report.nodeid, outcome=report.outcome, seconds=report.duration, seen=text)

    def _write(self, **values: Any) -> None:
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(values) + "\n")


def _why(report: pytest.TestReport) -> str:
    """Why it did not pass, in a line; empty where it did."""
    found: Any = report.longrepr
    text = found[2] if isinstance(found, tuple) else getattr(getattr(found, "reprcrash", None), "message", found or "")
    return str(text).strip().split("\n", 1)[0]
