"""What to verify (program, steps, devices), and what one run of it is: on how many replicas, with what changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.checks import check_least, check_seconds
from lockstep.config import parse_device_request
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and its command line."""

    name: str  # its name in the report
    target: str  # path of a script, or dotted name of a module that ``python -m`` can run
    kind: Literal["script", "module"] = "script"  # whether ``target`` is a script or a module
    arguments: tuple[str, ...] = ()  # the program's command-line arguments
    scratch_flag: str | None = None  # a flag of the program that takes an output folder; it is given a temporary one


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """One verification.

    Raises:
        ConfigError: a value is out of range, or the script is not a file.
    """

    program: Program  # the program to run
    steps: int = 3  # number of optimizer updates to compare, at least 1
    # how to divide the devices before the program starts, such as ``cpu:4``; None leaves it to the program
    devices: str | None = None
    timeout_s: float = 300.0  # time limit of each run, in seconds

    def __post_init__(self) -> None:
        check_least(self, 1, "steps")
        check_seconds("timeout_s", self.timeout_s)
        if self.devices is not None:
            parse_device_request(self.devices)
        script = Path(self.program.target)
        if self.program.kind == "script" and not script.is_file():
            problem = "is a folder" if script.is_dir() else "does not exist"
            raise ConfigError(
                f"the script {self.program.target!r} {problem}, expected a Python file or the name of a recipe"
            )


Randomness = Literal["unchanged", "no dropout", "constant"]


@dataclass(frozen=True, kw_only=True)
class Interventions:
    """What an experiment changes in a run. The defaults change nothing."""

    # "no dropout" turns dropout off; "constant" also replaces every other random draw in a replica
    randomness: Randomness = "unchanged"
    sync_batch_norm: bool = False  # take batch statistics over the global batch
    hold_weights: bool = False  # before each run, restore the parameters to their values after the last update
    shards: int = 1  # if above 1, the single replica calls its module once per shard, as that many replicas would
    # before the first step, multiply each weight by 1 + nudge or 1 - nudge, to see how rounding grows
    nudge: float = 0.0
    threads: int | None = None  # number of intra-op threads; None leaves torch's default


UNCHANGED = Interventions()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One of the two runs of a comparison."""

    all_replicas: bool  # use all devices that the program chose, or only the first
    interventions: Interventions = UNCHANGED  # what is changed
