"""``--batch-size auto``: finds the largest global batch that fits, then runs the command with it.

The run is bit for bit the one with the found number as ``--batch-size``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Annotated, Any

import typer

from lockstep.cli.devices import take_devices
from lockstep.cli.flags import config_command, field_docs
from lockstep.cli.grid import NOT_DIVIDED, GridFlags
from lockstep.cli.in_workers import InWorkers
from lockstep.cli.output import check_output
from lockstep.cluster.resolve import cluster_from_environment
from lockstep.errors import ConfigError
from lockstep.recipes.batch_size import LargestBatch
from lockstep.strategies.base import Strategy
from lockstep.strategies.mirrored import MirroredStrategy

AUTO = "auto"

Job = Callable[[], int | InWorkers]
Largest = Callable[[Any, Strategy], LargestBatch]


def training_command(
    config: type[Any], largest: Largest, *, noun: str, groups: Mapping[str, str]
) -> Callable[[Callable[..., Job]], Callable[..., Job]]:
    """Decorates as ``config_command`` does, for a recipe whose ``--batch-size`` is a number or "auto".

    Args:
        config: the recipe's dataclass, with ``batch_size`` and ``seed``; the function has ``devices`` and ``output``.
        largest: finds the batch size; called with a config, whose batch size is the default, and a strategy.
        noun: what an example is called, such as "line".
        groups: first field of a group of flags -> title of the group in the help.
    """

    def decorate(function: Callable[..., Job]) -> Callable[..., Job]:
        with_number = config_command(config, groups=groups)(function)
        own = inspect.signature(function).parameters

        def command(*, batch_size: str, **flags: Any) -> Job:
            if batch_size != AUTO:
                return with_number(batch_size=_number(batch_size), **flags)
            settings = config(**{name: value for name, value in flags.items() if name not in own})

            def job() -> int | InWorkers:
                _refuse_grid(flags.get("grid", NOT_DIVIDED))
                check_output(flags["output"].expanduser())  # now rather than after the search
                size = _search(settings, largest, flags["devices"], noun=noun)
                return with_number(batch_size=size, **flags)()

            return job

        signature = inspect.signature(with_number)
        parameters = [_flag(p, config) if p.name == "batch_size" else p for p in signature.parameters.values()]
        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _flag(number: inspect.Parameter, config: type[Any]) -> inspect.Parameter:
    option = number.annotation.__metadata__[0]
    documented = field_docs(config)["batch_size"].rstrip(".")
    text = f"{documented[:1].upper()}{documented[1:]}; auto finds the largest that fits."
    flag = typer.Option(metavar="NUMBER|auto", help=text, rich_help_panel=option.rich_help_panel)
    return number.replace(annotation=Annotated[str, flag], default=str(number.default))


def _number(given: str) -> int:
    try:
        return int(given)
    except ValueError:
        raise ConfigError(f"batch_size={given!r} was given, expected an integer or {AUTO}") from None


def _refuse_grid(grid: GridFlags) -> None:
    if grid.asked:
        raise ConfigError(
            f"--batch-size {AUTO} tries batches in one process that holds the whole model, and {grid.flags} divides "
            "it; give a number"
        )


def _search(settings: Any, largest: Largest, devices: str | None, *, noun: str) -> int:
    cluster = cluster_from_environment()
    if cluster is not None and cluster.num_workers > 1:
        raise ConfigError(
            f"--batch-size {AUTO} tries batches in one process, and {cluster.source} declares {cluster.num_workers} "
            "workers; find the size with one worker, and give --batch-size that number times the number of workers"
        )
    strategy = MirroredStrategy(take_devices(devices), seed=settings.seed)
    with closing(strategy), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run that follows gives the same warnings
        found = largest(settings, strategy)
    limit = "the memory of the GPUs" if found.memory_mb is None else f"{found.memory_mb:,.0f} MB for this process"
    print(
        f"batch size {AUTO}: {found.size:,} {noun}s fit; the limits are {limit} "
        f"and the {found.examples:,} {noun}s of the training split",
        flush=True,
    )
    return found.size
