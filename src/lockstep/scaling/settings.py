"""What is asked of a scaling run: replicas, batch, steps, rounds. Plain data that rejects bad values itself."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """How a recipe is measured.

    Args:
        batch_size: the global batch of one device, b in the tables.
        replicas: how many replicas to measure beside one device; 1 among them means that device.
        steps: timed steps of a configuration; an epoch that has no more is timed whole.
        epochs: whole epochs to time, however long; by default the number of steps decides.
        warm_up: steps before the timed ones, at least 1.
        rounds: how often every configuration is measured, in turn with the others.
    """

    batch_size: int
    replicas: tuple[int, ...]
    steps: int = 24
    epochs: int | None = None
    warm_up: int = 3
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("batch_size", "steps", "epochs", "warm_up", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} was given, expected at least 1; raise it")
        if not self.replicas or min(self.replicas) < 1:
            raise ConfigError(f"replicas={list(self.replicas)} was given, expected numbers of at least 1, such as 2,4")
        most = max(self.replicas)
        if self.batch_size < most:
            raise ConfigError(
                f"a total batch of {self.batch_size} leaves some of {most} replicas without an example; "
                f"raise --batch-size to at least {most}, or lower --replicas"
            )

    def timed_steps(self, steps_an_epoch: int) -> int:
        """How many steps are timed where an epoch has ``steps_an_epoch``."""
        return steps_an_epoch * self.epochs if self.epochs is not None else min(self.steps, steps_an_epoch)


def usual_replicas(devices: int) -> tuple[int, ...]:
    """The replicas that are measured if nobody says: 2, 4, 8 ... and all.

    Example:
        >>> usual_replicas(6)
        (2, 4, 6)
    """
    powers = [2**power for power in range(1, devices.bit_length()) if 2**power < devices]
    return (*powers, devices)


def parse_replicas(text: str) -> tuple[int, ...]:
    """Reads ``1,2,4``.

    Raises:
        ConfigError: something in it is no number.
    """
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--replicas {text!r} cannot be read; write numbers with commas between, such as 2,4"
        ) from None
