"""``lockstep bench``: measurements of the recipes, and of the schedules of a pipeline, on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from lockstep import console
from lockstep.config import list_physical_devices
from lockstep.extras import require
from lockstep.parallel.pipeline_config import SCHEDULES
from lockstep.parallel.pipeline_trace import textbook_bubble
from lockstep_tools.cli.app import COMMANDS
from lockstep_tools.cli.devices import take_devices
from lockstep_tools.cli.flags import (
    BenchDevicesFlag,
    CommandsHelp,
    FolderFlag,
    Nested,
    check_file,
    check_folder,
    command,
)
from lockstep_tools.scaling import pipeline_bench as pipeline
from lockstep_tools.scaling.configurations import ScalingSettings, parse_replicas, usual_replicas
from lockstep_tools.scaling.machine import this_machine
from lockstep_tools.scaling.recipes import RECIPES, Recipe
from lockstep_tools.scaling.report import report_files, terminal_tables, write_scaling_report
from lockstep_tools.scaling.runner import Sample, measure_scaling

EXAMPLE = "Example: lockstep bench scaling images --devices cpu:4 --replicas 2,4"


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep bench`` and its commands."""
    bench, scaling = typer.Typer(cls=CommandsHelp), typer.Typer(cls=CommandsHelp)
    # A command for each recipe: its flags are those of the recipe's config.
    for recipe in RECIPES.values():
        example = f"Example: lockstep bench scaling {recipe.name} --devices cpu:2"
        scaling.command(recipe.name, epilog=example)(
            command(
                BenchScaling,
                {"recipe": recipe},
                settings=Nested(
                    kind=ScalingSettings,
                    constants={"replicas": (1,)},
                    defaults={"batch_size": recipe.config().batch_size},
                ),
                config=Nested(kind=recipe.config, without=recipe.fixed),
            )
        )
    about = "Measure a recipe on one device and on N: speed, and where the time of a step goes."
    bench.add_typer(scaling, name="scaling", help=about, epilog=EXAMPLE)
    example = "Example: lockstep bench pipeline --workers 2 --schedules 1f1b,zero_bubble"
    bench.command("pipeline", epilog=example)(
        command(BenchPipeline, settings=Nested(kind=pipeline.PipelineSettings, constants={"schedules": SCHEDULES}))
    )
    app.add_typer(bench, name="bench", help=COMMANDS["bench"], epilog=EXAMPLE)


@dataclass(frozen=True, kw_only=True)
class BenchScaling:
    """Measure the recipe on one device and on N, in turn, each in a fresh process.

    Args:
        devices: how to divide the devices.
        replicas: how many replicas to measure beside one device. Default: 2, 4, 8 and so on, and all devices.
        output: folder for the HTML page and JSON.
    """

    devices: BenchDevicesFlag = None
    replicas: Annotated[str | None, typer.Option(metavar="N,N")] = None
    output: FolderFlag = Path("runs/scaling")
    recipe: Recipe
    settings: ScalingSettings
    config: Any

    def __call__(self) -> int:
        # What would fail at the end fails now:
        for package in ("jinja2", "matplotlib"):
            require(package, "plots")
        devices = self.devices or ("gpu" if list_physical_devices("GPU") else "cpu:2")
        logical, output = take_devices(devices), self.output.expanduser()
        check_folder(output)
        files = report_files(output, date=date.today().isoformat(), recipe=self.recipe.name, devices=devices)
        for file in files:
            check_file(file)
        replicas = usual_replicas(len(logical)) if self.replicas is None else parse_replicas(self.replicas)
        result = measure_scaling(
            self.recipe,
            self.config,
            replace(self.settings, replicas=replicas),
            devices=devices,
            logical=logical,
            progress=_say_scaling,
        )
        print(f"\n{terminal_tables(result)}\n")
        write_scaling_report(files, result)
        print("page    {}\nsamples {}".format(*files))
        return 0


def _say_scaling(sample: Sample, completed: int, planned: int) -> None:
    record, configuration = sample.record, sample.configuration
    line = (
        f"{completed:3d}/{planned}  round {sample.round + 1}  {configuration.name:<29} "
        f"batch {configuration.batch_size:4d}  "
        f"{median(record.step_ms):8.1f} ms a step  {record.examples_per_s:9,.1f} examples/s  loss {record.loss:.4f}"
    )
    # Flushed: in a pipe the lines would otherwise come all at the end of a run of minutes.
    print(console.fill(line), flush=True)


@dataclass(frozen=True, kw_only=True)
class BenchPipeline:
    """Measure how long the workers of a pipeline are idle under each schedule, beside theory.

    Args:
        schedules: names of schedules.
        output: folder for Markdown and the picture.
    """

    schedules: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help=f"Some of {', '.join(SCHEDULES)}. Default: all.")
    ] = None
    output: FolderFlag = Path("runs/pipeline")
    settings: pipeline.PipelineSettings

    def __call__(self) -> int:
        settings = replace(self.settings, schedules=pipeline.parse_schedules(self.schedules))
        output = self.output.expanduser()
        # What would fail at the end fails now:
        for package, extra in (("transformers", "text"), ("matplotlib", "plots")):
            require(package, extra)
        check_folder(output)
        files = pipeline.pipeline_files(output, date=date.today().isoformat(), cores=this_machine().cores)
        for file in files:
            check_file(file)
        workers, microbatches = settings.workers, settings.microbatches
        usual = textbook_bubble(workers, microbatches)
        print(f"S={workers} workers, M={microbatches} microbatches: (S-1)/(M+S-1) = {usual:.1%}\n")
        result = pipeline.measure_pipeline(settings, progress=_say_pipeline)
        print(f"\n{pipeline.terminal_table(result)}\n")
        pipeline.write_pipeline_report(files, result)
        print("table   {}\npicture {}".format(*files))
        return 0


def _say_pipeline(sample: pipeline.Sample, completed: int, planned: int) -> None:
    bubble = median(step.bubble for step in sample.steps)
    length_ms = 1000 * median(step.length for step in sample.steps)
    print(
        f"{completed:3d}/{planned}  round {sample.round + 1}  {sample.schedule:<13}  {length_ms:8.1f} ms a step  "
        f"idle {bubble:6.1%}",
        flush=True,
    )
