"""``lockstep train mlm``: a small BERT learns to fill in masked words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.backup import BackupFlag, BackupPlan, ResumeFlag
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
from lockstep.parallel.mesh_layout import MeshLayout, check_divides
from lockstep.parallel.pipeline_config import PipelineConfig, check_layers, split_layers
from lockstep.recipes.mlm.config import MlmConfig
from lockstep.recipes.mlm.fill_mask import Filled, check_examples
from lockstep.recipes.mlm.train import check_exactness, train_mlm
from lockstep.recipes.text.tokenizer import MASK
from lockstep.report import text_table
from lockstep.strategies.base import Strategy
from lockstep.train.fit import Verbose

MLM_EXAMPLE = "Example: lockstep train mlm --devices cpu:4 --epochs 2 --output runs/mlm"

ExampleFlag = Annotated[
    list[str],
    typer.Option(
        "--example",
        metavar="SENTENCE",
        help="A sentence with [MASK] for each word to fill in at the end; may be given several times. Without it a word"
        " is hidden in each of five lines of the test text.",
    ),
]
_NO_EXAMPLE: list[str] = []
_AROUND = 32
"""Characters that are shown before and after a hidden word."""


def mlm(
    *,
    config: MlmConfig,
    grid: GridFlags,
    example: ExampleFlag = _NO_EXAMPLE,
    devices: DevicesFlag = None,
    output: OutputFlag = Path("runs/mlm"),
    resume: ResumeFlag = False,
    backup: BackupFlag = "epoch",
    check_exact: CheckFlag = False,
    quiet: QuietFlag = False,
) -> TrainingCommand:
    """Train a small BERT to fill in masked words, over the English prose of Python itself or a folder of text."""
    if config.pretrained is None:  # whose tokenizer may have another mask; then it is seen when that is read
        check_examples(example, MASK)
    plan = BackupPlan(often=backup, resume=resume)
    run = _Run(config=config, examples=tuple(example) or None, backup=plan)
    job = TrainingJob(
        title="masked language model",
        work=_work(config),
        seed=config.seed,
        train=run.train,
        check=partial(check_exactness, config),
        fits=partial(_check_sizes, config),
        backup=plan,
    )
    flags = TrainingFlags(devices=devices, output=output, check_exact=check_exact, quiet=quiet, grid=grid)
    return TrainingCommand(job=job, flags=flags)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What was asked for.

    Args:
        config: the run.
        examples: sentences to fill in at the end; None for lines of the test text.
        backup: what an interrupted run leaves, and whether this one goes on from it.
    """

    config: MlmConfig
    examples: Sequence[str] | None
    backup: BackupPlan

    def train(self, strategy: Strategy, logs: Path, model: Path, verbose: Verbose) -> Trained:
        """Trains, and gives what is reported."""
        result = train_mlm(
            self.config,
            strategy,
            examples=self.examples,
            callbacks=self.backup.callbacks(model.parent),
            log_dir=logs,
            output_dir=model,
            verbose=verbose,
        )
        return Trained(
            history=result.history,
            test_metrics=result.test_metrics,
            size=f"{result.parameters:,} parameters, {result.vocabulary:,} tokens",
            last=["", filled_table(result.filled)] if result.filled else [],
        )


def filled_table(filled: Sequence[Filled]) -> str:
    """A line for each sentence: what the model would fill in, what stood there, and where.

    Several hidden words of one sentence are parted by strokes.
    """
    rows = [
        [
            " | ".join(
                ", ".join(f"{guess.word} {guess.probability:.2f}" for guess in guesses) for guesses in each.guesses
            ),
            each.question.hidden or "",
            _around_the_mask(each.question.text),
        ]
        for each in filled
    ]
    headings = ["would fill in", "hidden", "sentence"]
    if not any(each.question.hidden for each in filled):
        headings, rows = [headings[0], headings[2]], [[row[0], row[2]] for row in rows]
    return text_table(headings, rows)


def _around_the_mask(text: str) -> str:
    """The text between some characters before the first hidden word and as many after the last."""
    plain = " ".join(text.split())
    begin, end = max(0, plain.find(MASK) - _AROUND), plain.rfind(MASK) + len(MASK) + _AROUND
    return f"{'...' if begin else ''}{plain[begin:end]}{'...' if end < len(plain) else ''}"


def _check_sizes(config: MlmConfig, grid: MeshLayout, pipelining: PipelineConfig) -> None:
    """What dividing the model would refuse too, when the text has been read; a pretrained one's sizes are not known."""
    if config.pretrained is not None:
        return
    sizes = [(name, getattr(config, name)) for name in ("heads", "hidden", "feed_forward")]
    check_divides("tensor", grid.tensor, sizes)
    check_layers(pipelining, config.layers)
    split_layers([1.0] * config.layers, pipelining.stages)


def _work(config: MlmConfig) -> str:
    text = "the prose of Python itself" if config.text is None else str(config.text)
    batches = f"global batches of {counted(config.batch_size, 'line')}"
    return f"{text}, {batches}, {counted(config.epochs, 'epoch')}, {config.precision}"
