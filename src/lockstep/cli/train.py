"""``lockstep train``: one command for each recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli.devices import DevicesFlag, logical_table, take_devices
from lockstep.cli.flags import config_command
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.run import check_exactness, train_mlm
from lockstep.report.curves import draw_curves
from lockstep.report.table import epochs_table, history_columns, metrics_line
from lockstep.strategies.mirrored import MirroredStrategy

MLM_EXAMPLE = "Example: lockstep train mlm --devices cpu:4 --epochs 2 --output runs/mlm"

OutputFlag = Annotated[Path, typer.Option(metavar="DIR", help="Where the logs, the weights and the curves are put.")]
CheckFlag = Annotated[
    bool, typer.Option("--check-exact", help="Then repeat the first steps on one device, without dropout, and compare.")
]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="No progress lines; the result alone.")]


def train_app() -> typer.Typer:
    """The commands under ``lockstep train``."""
    app = typer.Typer()
    app.callback()(_train)
    app.command("mlm", epilog=MLM_EXAMPLE)(config_command(MlmConfig)(mlm))
    return app


def mlm(
    *,
    config: MlmConfig,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/mlm"),
    check_exact: CheckFlag = False,
    quiet: QuietFlag = False,
) -> Callable[[], int]:
    """Train a small BERT to fill in masked words, over the English prose of Python itself or a folder of text."""

    def job() -> int:
        folder = output.expanduser()
        # Now rather than after the training:
        _check_output(folder)
        for package in ("matplotlib", "tensorboard"):
            require(package, "report")
        chosen = take_devices(devices)
        print(f"{_summary(config, chosen)}\n\n{logical_table(chosen)}\n", flush=True)
        with closing(MirroredStrategy(chosen, seed=config.seed)) as strategy:
            _train_and_report(config, strategy, folder, verbose=0 if quiet else 1)
            if check_exact:
                print(f"\n{check_exactness(config, strategy)}")
        return 0

    return job


def _train() -> None:
    """Train one of the recipes."""


def _train_and_report(config: MlmConfig, strategy: MirroredStrategy, output: Path, *, verbose: Literal[0, 1]) -> None:
    # A folder of its own for every run: TensorBoard draws the runs under one folder as one crooked line.
    logs = output / "logs" / f"{datetime.now():%Y%m%d-%H%M%S}"
    result = train_mlm(config, strategy, log_dir=logs, output_dir=output / "model", verbose=verbose)
    columns = history_columns(result.history)
    print(f"\n{epochs_table(columns)}\n")
    print(f"test    {metrics_line(result.test_metrics)}")
    print(f"model   {output / 'model'} ({result.parameters:,} parameters, {result.vocabulary:,} tokens)")
    print(f"logs    tensorboard --logdir {output / 'logs'}")
    curves = draw_curves(columns, output / "curves.png", title=_title(strategy), test=result.test_metrics)
    print(f"curves  {curves}")


def _summary(config: MlmConfig, devices: Sequence[LogicalDevice]) -> str:
    text = "the prose of Python itself" if config.text is None else str(config.text)
    return (
        f"masked language model on {_count(len(devices), 'logical device')}: {text}, "
        f"global batches of {_count(config.batch_size, 'line')}, {_count(config.epochs, 'epoch')}, {config.precision}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _title(strategy: MirroredStrategy) -> str:
    return f"masked language model on {', '.join(device.name for device in strategy.devices)}"


def _check_output(output: Path) -> None:
    """Refuses an output that could not be written at the end, before anything is trained and without writing."""
    for folder in (output, output / "logs", output / "model"):
        _check_folder(folder)
    if (output / "curves.png").is_dir():
        raise ConfigError(f"--output has a folder {str(output / 'curves.png')!r}, expected a file; move it away")


def _check_folder(folder: Path) -> None:
    present = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not present.is_dir():
        raise ConfigError(
            f"--output needs the folder {str(folder)!r}, but {str(present)!r} is a file, expected a folder;"
            " give another name or move it away"
        )
    if not os.access(present, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--output needs the folder {str(folder)!r}, but {str(present)!r} cannot be written to;"
            " give another name or change its permissions"
        )
