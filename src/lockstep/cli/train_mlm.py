"""``lockstep train mlm``: a small BERT learns to fill in masked words."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lockstep.cli.devices import DevicesFlag
from lockstep.cli.grid import GridFlags
from lockstep.cli.training import (
    CheckFlag,
    OutputFlag,
    QuietFlag,
    Trained,
    TrainingCommand,
    TrainingFlags,
    TrainingJob,
    counted,
)
from lockstep.parallel.grid import Grid, check_divides
from lockstep.parallel.microbatches import Pipelining, check_layers
from lockstep.parallel.split import split_layers
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.run import check_exactness, train_mlm
from lockstep.strategies.base import Strategy
from lockstep.train.fit_settings import Verbose

MLM_EXAMPLE = "Example: lockstep train mlm --devices cpu:4 --epochs 2 --output runs/mlm"


def mlm(
    *,
    config: MlmConfig,
    grid: GridFlags,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/mlm"),
    check_exact: CheckFlag = False,
    quiet: QuietFlag = False,
) -> TrainingCommand:
    """Train a small BERT to fill in masked words, over the English prose of Python itself or a folder of text."""
    job = TrainingJob(
        title="masked language model",
        work=_work(config),
        seed=config.seed,
        train=partial(_train, config),
        check=partial(check_exactness, config),
        fits=partial(_check_sizes, config),
    )
    flags = TrainingFlags(devices=devices, output=output, check_exact=check_exact, quiet=quiet, grid=grid)
    return TrainingCommand(job=job, flags=flags)


def _check_sizes(config: MlmConfig, grid: Grid, pipelining: Pipelining) -> None:
    """What dividing the model would refuse too, when the text has been read; a pretrained one's sizes are not known."""
    if config.pretrained is not None:
        return
    sizes = [(name, getattr(config, name)) for name in ("heads", "hidden", "feed_forward")]
    check_divides("tensor", grid.tensor, sizes)
    check_layers(pipelining, config.layers)
    split_layers([1.0] * config.layers, pipelining.stages)


def _train(config: MlmConfig, strategy: Strategy, logs: Path, model: Path, verbose: Verbose) -> Trained:
    result = train_mlm(config, strategy, log_dir=logs, output_dir=model, verbose=verbose)
    size = f"{result.parameters:,} parameters, {result.vocabulary:,} tokens"
    return Trained(history=result.history, test_metrics=result.test_metrics, size=size)


def _work(config: MlmConfig) -> str:
    text = "the prose of Python itself" if config.text is None else str(config.text)
    batches = f"global batches of {counted(config.batch_size, 'line')}"
    return f"{text}, {batches}, {counted(config.epochs, 'epoch')}, {config.precision}"
