"""``python -m benchmarks``: measures all contenders in turn, says how far it is, and writes the dated table."""

from __future__ import annotations

import argparse
import logging
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks.frameworks import Places
from benchmarks.gpu.suite import add_gpu_options, measure_gpu
from benchmarks.harness import Absence, Rounds, Sample, run_rounds
from benchmarks.hosts import Link
from benchmarks.report import Conditions, WorkloadResult, render, write_report
from benchmarks.results import efficiencies_of, figures_of
from benchmarks.suites.choices import measure_cpu_choices, write_choices_report
from benchmarks.suites.cpu import Lineup, line_up, trials_of
from benchmarks.suites.layouts import LayoutsConditions, Row, measure_layouts, write_layouts_report
from benchmarks.suites.memory import Measured, measure_choices, write_memory_report
from benchmarks.suites.workers import WorkersSettings, measure_workers, write_workers_report
from benchmarks.workloads import WORKLOADS
from lockstep.errors import ConfigError, LockstepError
from lockstep.scaling.machine import this_machine

_log = logging.getLogger("benchmarks")
_USUAL = ("mobilenetv2", "mlm")
_MANY_SHORT_STEPS, _FEW_LONG_STEPS, _TRAINER_STEPS = (3, 10, 3), (1, 2, 1), (5, 40, 3)
"""Steps of warm-up, timed steps, and rounds, where the command line does not say."""


def main(words: Sequence[str]) -> int:
    """Runs the benchmark; the exit code is 1 if it could not be run, not if a target was missed."""
    asked = _parser().parse_args(words)
    try:
        if asked.gpu:
            return measure_gpu(asked, words)
        path = _measure_of(asked)(asked, words)
    except LockstepError as error:
        _log.error("error: %s", error)
        return 1
    except KeyboardInterrupt:
        _log.error("interrupted; nothing was written")
        return 130
    _log.info("\nwritten to %s", path)
    return 0


def _measure_of(asked: argparse.Namespace) -> Callable[[argparse.Namespace, Sequence[str]], Path]:
    if asked.memory:
        return _measure_memory
    if asked.layouts:
        return _measure_layouts
    if asked.choices:
        return _measure_choices
    if asked.trainer:
        return _measure_trainer
    return _measure_workers if asked.workers else _measure


def _measure(asked: argparse.Namespace, words: Sequence[str]) -> Path:
    conditions = _conditions(asked, words)
    names = tuple(asked.workload or _USUAL)
    lineup = line_up(names, peers=asked.peers, places=_places(asked), only=asked.only)
    trials = [trial for name in names for trial in trials_of(WORKLOADS[name], lineup.contenders[name], conditions)]
    rounds = run_rounds(trials, rounds=conditions.rounds, progress=_say)
    results = [_result(name, lineup, rounds) for name in names]
    conditions = replace(conditions, peers=tuple(lineup.versions.items()))
    _log.info("\n%s", render(conditions, results))
    return write_report(Path(asked.output), conditions, results, rounds.samples)


def _measure_workers(asked: argparse.Namespace, words: Sequence[str]) -> Path:
    settings = WorkersSettings(
        workloads=tuple(asked.workload or _USUAL),
        link=Link(mbit=asked.link_mbit),
        only=None if asked.only is None else tuple(asked.only),
    )
    result = measure_workers(settings, _conditions(asked, words), _say)
    _log.info("\n%s", result.text)
    return write_workers_report(Path(asked.output), result)


def _measure_memory(asked: argparse.Namespace, words: Sequence[str]) -> Path:
    _check_alone(asked, "--memory")
    result = measure_choices(_conditions(asked, words), _say_choice, only=asked.only)
    _log.info("\n%s", result.text)
    return write_memory_report(Path(asked.output), result)


def _measure_layouts(asked: argparse.Namespace, words: Sequence[str]) -> Path:
    _check_alone(asked, "--layouts")
    usual = _conditions(asked, words)
    conditions = LayoutsConditions(
        date=usual.date, machine=usual.machine, command=usual.command, steps=usual.warm_up + usual.steps
    )
    result = measure_layouts(conditions, _say_layout, only=asked.only)
    _log.info("\n%s", result.text)
    return write_layouts_report(Path(asked.output), result)


def _measure_choices(asked: argparse.Namespace, words: Sequence[str]) -> Path:
    names = tuple(asked.workload or _USUAL)
    result = measure_cpu_choices(names, _conditions(asked, words), _say, only=asked.only)
    _log.info("\n%s", result.text)
    return write_choices_report(Path(asked.output), result)


def _measure_trainer(asked: argparse.Namespace, words: Sequence[str]) -> Path:
    from benchmarks.suites.trainer import measure_trainer, write_trainer_report  # transformers' Trainer: seconds

    _check_alone(asked, "--trainer")
    result = measure_trainer(_conditions(asked, words), _say, only=asked.only)
    _log.info("\n%s", result.text)
    return write_trainer_report(Path(asked.output), result)


def _check_alone(asked: argparse.Namespace, flag: str) -> None:
    alone = [asked.memory, asked.layouts, asked.trainer]
    if asked.workload or asked.workers or asked.peers != "no" or sum(alone) > 1:
        raise ConfigError(f"{flag} measures one step of its own; leave --workload, --workers and --peers out")


def _say_choice(name: str, outcome: Measured | str) -> None:
    if isinstance(outcome, str):
        _log.warning("%-28s not run: %s", name, outcome)
        return
    _log.info("%-28s peak %6.0f MB, %8.0f ms a step", name, outcome.peak_mb, median(outcome.step_ms))


def _say_layout(row: Row) -> None:
    expected = row.expected.total / 2**20
    _log.info("%-42s peak %6.0f MB a worker, expected %6.0f", row.layout.name, row.fullest.peak_mb, expected)


def _conditions(asked: argparse.Namespace, words: Sequence[str]) -> Conditions:
    usual = _FEW_LONG_STEPS if asked.memory or asked.layouts else _TRAINER_STEPS if asked.trainer else _MANY_SHORT_STEPS
    warm_up, steps, rounds = usual
    return Conditions(
        date=date.today().isoformat(),
        machine=this_machine(),
        command=shlex.join(["python", "-m", "benchmarks", *words]),
        warm_up=warm_up if asked.warm_up is None else asked.warm_up,
        steps=steps if asked.steps is None else asked.steps,
        rounds=rounds if asked.rounds is None else asked.rounds,
    )


def _result(name: str, lineup: Lineup, rounds: Rounds) -> WorkloadResult:
    absences = [absence for absence in (*lineup.absences, *rounds.absences) if absence.workload == name]
    away = {absence.contender for absence in absences}
    present = [contender for contender in lineup.contenders[name] if contender.name not in away]
    return WorkloadResult(
        workload=WORKLOADS[name],
        figures=tuple(figures_of(present, rounds.samples, name)),
        efficiencies=tuple(efficiencies_of(present, rounds.samples, name)),
        absences=tuple(absences),
    )


def _places(asked: argparse.Namespace) -> Places:
    return Places(environments=Path(asked.environments), programs=Path(asked.programs))


def _say(outcome: Sample | Absence, done: int, planned: int) -> None:
    if isinstance(outcome, Absence):
        _log.warning(
            "%3d/%d  %-12s %-27s takes no further part: %s",
            done,
            planned,
            outcome.workload,
            outcome.contender,
            outcome.reason,
        )
        return
    _log.info(
        "%3d/%d  round %d  %-12s %-27s %8.1f ms a step, first step after %5.2f s, peak %5.0f MB, loss %.4f",
        done,
        planned,
        outcome.round + 1,
        outcome.workload,
        outcome.contender,
        median(outcome.step_ms),
        outcome.first_step_s,
        outcome.memory.peak_mb,
        outcome.loss,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures training steps beside the peers, in turn on this machine, and writes a dated table.",
        epilog="Example: python -m benchmarks --workload mlm --rounds 1 --output runs/bench",
    )
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), help="which; mobilenetv2 and mlm by default")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help='names such as lockstep-2 "ddp-2 channels_last"')
    parser.add_argument(
        "--rounds", type=int, help="trials of each contender (default 3; with --memory and --layouts 1)"
    )
    parser.add_argument(
        "--steps", type=int, help="timed steps of a trial (default 10; with --memory and --layouts 2, --trainer 40)"
    )
    parser.add_argument(
        "--warm-up", type=int, help="steps before those (default 3; with --memory and --layouts 1, --trainer 5)"
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="measure what LoRA, bf16 and gradient checkpointing save instead; --only names rows of the table",
    )
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="measure what each worker's memory peaks at on several layouts instead, beside the estimate; --only names "
        "rows of the table",
    )
    parser.add_argument(
        "--choices",
        action="store_true",
        help="measure choices that the engine makes for replicas of a CPU beside others instead; --only names rows",
    )
    parser.add_argument(
        "--trainer",
        action="store_true",
        help="measure our Transformers Trainer beside the original instead, on the recipe reviews",
    )
    parser.add_argument(
        "--workers",
        action="store_true",
        help="measure many workers beside DDP instead: on this host, and on two that a slowed link joins (needs root)",
    )
    parser.add_argument(
        "--link-mbit", type=float, default=1000.0, help="with --workers: Mbit/s between the hosts (default 1000)"
    )
    parser.add_argument(
        "--peers",
        choices=("no", "also", "only"),
        default="no",
        help="whether Accelerate, Fabric, TensorFlow and JAX take part; make bench-peers makes their environments",
    )
    parser.add_argument("--environments", default=".venv-peers", help="folder of the peers' environments")
    parser.add_argument("--programs", default="benchmarks/peers", help="folder of the peers' programs")
    parser.add_argument("--output", default="benchmarks", help="folder of the tables (default benchmarks)")
    add_gpu_options(parser)
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: processes and folders go first
    sys.exit(main(sys.argv[1:]))
