"""``lockstep bench``: measurements of the recipes on this machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from lockstep.cli.bench_pipeline import EXAMPLE as PIPELINE_EXAMPLE
from lockstep.cli.bench_pipeline import pipeline_command
from lockstep.cli.devices import take_devices
from lockstep.cli.flags import check_file, check_folder, config_parameters, with_parameters
from lockstep.config import list_physical_devices
from lockstep.extras import require
from lockstep.scaling.plan import ScalingSettings, parse_replicas, usual_replicas
from lockstep.scaling.recipes import RECIPES, Recipe
from lockstep.scaling.report import report_files, terminal_tables, write_scaling_report
from lockstep.scaling.runner import Sample, measure_scaling

BENCH_EXAMPLE = "Example: lockstep bench scaling images --devices cpu:4 --replicas 2,4"

DevicesFlag = Annotated[
    str | None,
    typer.Option(
        metavar="SPEC",
        help="As in lockstep devices: cpu:4, gpu, gpu:0,gpu:2. Without it: every GPU, or else cpu:2.",
        show_default=False,
    ),
]
ReplicasFlag = Annotated[
    str | None,
    typer.Option(
        metavar="N,N",
        help="How many replicas to measure beside one device. Without it: 2, 4, 8 and so on, and all devices.",
        show_default=False,
    ),
]
OutputFlag = Annotated[Path, typer.Option(metavar="DIR", help="Where Markdown, JSON and the HTML page are put.")]


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where it is measured and where the report goes."""

    devices: str | None
    output: Path


def bench_app() -> typer.Typer:
    """The commands under ``lockstep bench``."""
    app = typer.Typer()
    app.callback()(_bench)
    app.add_typer(
        _scaling_app(),
        name="scaling",
        help="Measure a recipe on one device and on N: speed, and where the time of a step goes.",
        epilog=BENCH_EXAMPLE,
    )
    app.command("pipeline", epilog=PIPELINE_EXAMPLE)(pipeline_command())
    return app


def scaling_command(recipe: Recipe) -> Callable[..., Callable[[], int]]:
    """The command of one recipe: the flags of the measurement, then those of the recipe that it leaves free."""
    measured = [p for p in config_parameters(ScalingSettings) if p.name != "replicas"]
    free = [p for p in config_parameters(recipe.config) if p.name not in recipe.fixed]
    places = list(inspect.signature(_places, eval_str=True).parameters.values())

    def command(*, replicas: str | None, devices: str | None, output: Path, **flags: Any) -> Callable[[], int]:
        config = recipe.config(**{parameter.name: flags[parameter.name] for parameter in free})
        steps = {parameter.name: flags[parameter.name] for parameter in measured}

        def job() -> int:
            return _measure(recipe, config, replicas, steps, _Places(devices=devices, output=output.expanduser()))

        return job

    usual = recipe.config().batch_size
    parameters = [*places, *(p.replace(default=usual) if p.name == "batch_size" else p for p in measured), *free]
    return with_parameters(
        command,
        parameters,
        help_text=f"Measure the recipe {recipe.name} on one device and on N, in turn, each in a fresh process.",
    )


def _places(
    *, devices: DevicesFlag = None, replicas: ReplicasFlag = None, output: OutputFlag = Path("runs/scaling")
) -> None:
    """The flags that no config documents."""


def _scaling_app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(_scaling)
    for recipe in RECIPES.values():
        app.command(recipe.name, epilog=f"Example: lockstep bench scaling {recipe.name} --devices cpu:2")(
            scaling_command(recipe)
        )
    return app


def _measure(recipe: Recipe, config: Any, replicas: str | None, steps: dict[str, Any], places: _Places) -> int:
    # What would fail at the end fails now:
    for package in ("jinja2", "matplotlib"):
        require(package, "plots")
    usual = "gpu" if list_physical_devices("GPU") else "cpu:2"
    devices = usual if places.devices is None else places.devices
    logical = take_devices(devices)
    check_folder(places.output)
    files = report_files(places.output, date=date.today().isoformat(), recipe=recipe.name, devices=devices)
    for file in (files.markdown, files.json, files.page):
        check_file(file)
    chosen = usual_replicas(len(logical)) if replicas is None else parse_replicas(replicas)
    result = measure_scaling(
        recipe.name,
        config,
        ScalingSettings(replicas=chosen, **steps),
        devices=devices,
        logical=logical,
        output=places.output,
        progress=_say,
    )
    print(f"\n{terminal_tables(result)}\n")
    files = write_scaling_report(places.output, result)
    print(f"table   {files.markdown}\nsamples {files.json}\npage    {files.page}")
    return 0


def _say(sample: Sample, done: int, planned: int) -> None:
    record, configuration = sample.record, sample.configuration
    print(
        f"{done:3d}/{planned}  round {sample.round + 1}  {configuration.name:<29} batch {configuration.batch_size:4d}  "
        f"{median(record.step_ms):8.1f} ms a step  {record.examples / record.timed_s:9,.1f} examples/s  "
        f"loss {record.loss:.4f}",
        flush=True,
    )


def _bench() -> None:
    """Measure how fast a recipe trains."""


def _scaling() -> None:
    """Measure a recipe on one device and on N."""
