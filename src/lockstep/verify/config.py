"""What to verify: the program, how far, on which devices. Values that reject bad ones themselves; nothing runs here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.config import parse_device_request
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program as a person starts it.

    Args:
        name: how the report calls it.
        target: the path of a script, or the dotted name of a module that can be run.
        kind: which of the two.
        arguments: its command line, after its own name.
        scratch_flag: a flag that gets the name of a temporary folder, for a program that would write files.
    """

    name: str
    target: str
    kind: Literal["script", "module"] = "script"
    arguments: tuple[str, ...] = ()
    scratch_flag: str | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """One verification.

    Args:
        program: what to run.
        steps: updates to compare, at least 1.
        devices: ``cpu:4`` and the like: how to divide the devices before the program starts; None leaves it to it.
        timeout_s: seconds after which a run is ended.

    Raises:
        ConfigError: a value that cannot be used, or a script that is no file.
    """

    program: Program
    steps: int = 3
    devices: str | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} was given, expected at least 1 update to compare; try 3")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s:g} was given, expected a number of seconds above 0")
        if self.devices is not None:
            parse_device_request(self.devices)
        if self.program.kind == "script" and not Path(self.program.target).is_file():
            what = "is a folder" if Path(self.program.target).is_dir() else "does not exist"
            raise ConfigError(
                f"the script {self.program.target!r} {what}, expected a Python file, or the name of a recipe"
            )


Randomness = Literal["as written", "dropout", "constant"]
Statistics = Literal["as written", "synced", "frozen"]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """What an experiment changes in a run, in order to see whether the difference vanishes.

    Args:
        randomness: "constant" takes the random draws of the step away: dropout does nothing, and what else is drawn in
            a replica is a constant; "dropout" does so for dropout alone.
        batch_norm: "synced" takes batch-norm statistics from the whole batch; "frozen" uses the running ones.
        hold_weights: puts back what was changed in a parameter since its last update, before each run.
        shards: above 1, one replica calls its module once per shard, as that many replicas would.
        shard: of that many, the one replica gets this one alone, as a whole batch; None gives it all.
        nudge: before the first step, each parameter is multiplied by 1 + or - this: a rounding error, to see how it
            grows.
        threads: intra-op threads of the process; None leaves torch's number.
    """

    randomness: Randomness = "as written"
    batch_norm: Statistics = "as written"
    hold_weights: bool = False
    shards: int = 1
    shard: int | None = None
    nudge: float = 0.0
    threads: int | None = None


AS_WRITTEN = Switches()


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs of a comparison.

    Args:
        all_replicas: on all that the program chose, or on the first alone.
        switches: what is changed.
        only: the number of the replica of which alone is told; None tells of all.
    """

    all_replicas: bool
    switches: Switches = AS_WRITTEN
    only: int | None = None
