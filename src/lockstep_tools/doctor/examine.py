"""Runs all probes side by side, each within a time limit."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

from lockstep_tools.doctor.limits import examine_limits
from lockstep_tools.doctor.network import examine_network
from lockstep_tools.doctor.section import Fact, Section, Trouble
from lockstep_tools.doctor.software import examine_software

Probe = Callable[[], Section]
_KILL_S = 1.0  # to kill a process whose time is up


def examine(timeout_s: float) -> list[Section]:
    """Examines this machine. Takes at most about ``timeout_s`` seconds."""
    return run_probes(
        {
            "versions": examine_software,
            # In a process: a broken driver may hang or crash whoever asks it, and a thread in C cannot be killed.
            "devices": lambda: examine_in_process("lockstep_tools.doctor.devices", timeout_s),
            "network": examine_network,
            "limits": examine_limits,
        },
        timeout_s,
    )


def run_probes(probes: Mapping[str, Probe], timeout_s: float) -> list[Section]:
    """The sections of the probes, in their order.

    A probe that fails or takes too long gives a section that says so, with a trouble.
    """
    sections: dict[str, Section] = {}

    def run(title: str, probe: Probe) -> None:
        try:
            sections[title] = probe()
        except subprocess.TimeoutExpired:
            sections[title] = _late(title, timeout_s)
        except Exception as error:  # noqa: BLE001 - the others are to be shown whatever a machine does to one
            sections[title] = _failed(title, f"failed ({type(error).__name__})", f"{type(error).__name__}: {error}")

    # Longer than the probe in a process has: it is killed before this process may end.
    deadline = time.monotonic() + timeout_s + _KILL_S
    # Threads that do not keep the process alive: a look-up may hang for a minute, and cannot be interrupted.
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in probes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [sections.get(title) or _late(title, timeout_s) for title in probes]


def examine_in_process(module: str, timeout_s: float) -> Section:
    """The section that a module prints as JSON, in a process that is killed when its time is up.

    Raises RuntimeError with the last line of its error output if it fails, and TimeoutExpired.
    """
    command = [sys.executable, "-m", module]
    process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if process.returncode:
        raise RuntimeError(
            process.stderr.strip().rpartition("\n")[2] or f"it ended with exit code {process.returncode}"
        )
    # The last line: libraries print greetings and warnings before it.
    return Section.from_json(process.stdout.splitlines()[-1])


def _late(title: str, timeout_s: float) -> Section:
    reason = f"it took longer than {timeout_s:g} s; --timeout-s gives it more"
    return _failed(title, f"did not end in {timeout_s:g} s", reason)


def _failed(title: str, outcome: str, reason: str) -> Section:
    """The section of a probe that has no facts. ``outcome`` is the fact in their place, ``reason`` the trouble's."""
    text = f"The {title} could not be examined: {reason}."
    trouble = Trouble(text, public=f"The {title} could not be examined.")
    return Section(title=title, facts=(Fact("examination", outcome),), troubles=(trouble,))
