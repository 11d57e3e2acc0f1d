"""``lockstep doctor``: versions, devices, network, limits and known troubles of this machine."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from lockstep import console
from lockstep.checks import check_seconds
from lockstep_tools.cli.flags import command
from lockstep_tools.doctor.examine import examine
from lockstep_tools.doctor.section import as_report, as_text


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep doctor``."""
    app.command("doctor", epilog="Example: lockstep doctor")(command(Doctor))


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Show versions, devices, network and limits of this machine, and its known troubles.

    The last lines are a block to paste into a report, without names of hosts, addresses and folders.

    Args:
        report: print only the block for a report.
        timeout_s: seconds that each part of the examination may take.
    """

    report: bool = False
    timeout_s: float = 20.0

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)

    def __call__(self) -> int:
        sections = examine(self.timeout_s)
        if not self.report:
            print(f"{console.fill(as_text(sections))}\n\nTo paste into a report:\n")
        print(as_report(sections))
        return 0
