"""``lockstep train mlm``: a small BERT learns to fill in masked words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lockstep.cli.devices import DevicesFlag
from lockstep.cli.training import (
    CheckFlag,
    OutputFlag,
    QuietFlag,
    Trained,
    TrainingFlags,
    TrainingJob,
    counted,
    run_training,
)
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.run import check_exactness, train_mlm
from lockstep.strategies.base import Strategy
from lockstep.train.fit_settings import Verbose

MLM_EXAMPLE = "Example: lockstep train mlm --devices cpu:4 --epochs 2 --output runs/mlm"


def mlm(
    *,
    config: MlmConfig,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/mlm"),
    check_exact: CheckFlag = False,
    quiet: QuietFlag = False,
) -> Callable[[], int]:
    """Train a small BERT to fill in masked words, over the English prose of Python itself or a folder of text."""
    job = TrainingJob(
        title="masked language model",
        work=_work(config),
        seed=config.seed,
        train=partial(_train, config),
        check=partial(check_exactness, config),
    )
    flags = TrainingFlags(devices=devices, output=output, check_exact=check_exact, quiet=quiet)
    return partial(run_training, job, flags)


def _train(config: MlmConfig, strategy: Strategy, logs: Path, model: Path, verbose: Verbose) -> Trained:
    result = train_mlm(config, strategy, log_dir=logs, output_dir=model, verbose=verbose)
    size = f"{result.parameters:,} parameters, {result.vocabulary:,} tokens"
    return Trained(history=result.history, test_metrics=result.test_metrics, size=size)


def _work(config: MlmConfig) -> str:
    text = "the prose of Python itself" if config.text is None else str(config.text)
    batches = f"global batches of {counted(config.batch_size, 'line')}"
    return f"{text}, {batches}, {counted(config.epochs, 'epoch')}, {config.precision}"
