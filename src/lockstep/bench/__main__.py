"""``python -m lockstep.bench``: measures all contenders in turn, says how far it is, and writes the dated table."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median

from lockstep.bench.figures import figures_of
from lockstep.bench.harness import Sample, run_rounds
from lockstep.bench.machine import this_machine
from lockstep.bench.markdown import Conditions, WorkloadResult, render
from lockstep.bench.report import write_report
from lockstep.bench.roster import roster
from lockstep.bench.trial import Contender, Trial
from lockstep.bench.workloads import WORKLOADS, find_workload
from lockstep.errors import ConfigError, LockstepError

_log = logging.getLogger("lockstep.bench")
_USUAL = ("mobilenetv2", "mlm")


def main(words: Sequence[str]) -> int:
    """Runs the benchmark; the exit code is 1 if it could not be run, not if a target was missed."""
    asked = _parser().parse_args(words)
    try:
        path = _measure(asked, words)
    except LockstepError as error:
        _log.error("error: %s", error)
        return 1
    _log.info("\nwritten to %s", path)
    return 0


def _measure(asked: argparse.Namespace, words: Sequence[str]) -> Path:
    machine = this_machine()
    conditions = Conditions(
        date=date.today().isoformat(),
        machine=machine,
        command=shlex.join(["python", "-m", "lockstep.bench", *words]),
        warm_up=asked.warm_up,
        steps=asked.steps,
        rounds=asked.rounds,
    )
    names = tuple(asked.workload or _USUAL)
    contenders = {name: _chosen(roster(find_workload(name).name), asked.only) for name in names}
    trials = [
        Trial(
            workload=WORKLOADS[name],
            contender=contender,
            warm_up=asked.warm_up,
            steps=asked.steps,
            cores=machine.cores,
        )
        for name in names
        for contender in contenders[name]
    ]
    samples = run_rounds(trials, rounds=asked.rounds, progress=_say)
    results = [
        WorkloadResult(workload=WORKLOADS[name], figures=tuple(figures_of(contenders[name], samples, name)))
        for name in names
    ]
    _log.info("\n%s", render(conditions, results))
    return write_report(Path(asked.output), conditions, results, samples)


def _say(sample: Sample, done: int, planned: int) -> None:
    _log.info(
        "%3d/%d  round %d  %-12s %-27s %8.1f ms a step, first step after %5.2f s, peak %5.0f MB, loss %.4f",
        done,
        planned,
        sample.round + 1,
        sample.workload,
        sample.contender,
        median(sample.step_ms),
        sample.first_step_s,
        sample.memory.peak_mb,
        sample.loss,
    )


def _chosen(contenders: Sequence[Contender], only: Sequence[str] | None) -> list[Contender]:
    chosen = [contender for contender in contenders if not only or contender.name in only]
    if not chosen:
        known = ", ".join(repr(contender.name) for contender in contenders)
        raise ConfigError(f"--only {' '.join(only or ())} names no contender; choose from {known}")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.bench",
        description="Measures training steps beside the peers, in turn on this machine, and writes a dated table.",
        epilog="Example: python -m lockstep.bench --workload mlm --rounds 1 --output runs/bench",
    )
    parser.add_argument("--workload", nargs="+", choices=tuple(WORKLOADS), help="which; mobilenetv2 and mlm by default")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help='names such as lockstep-2 "ddp-2 channels_last"')
    parser.add_argument("--rounds", type=int, default=3, help="trials of each contender (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a trial (default 10)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those (default 3)")
    parser.add_argument("--output", default="benchmarks", help="folder of the tables (default benchmarks)")
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main(sys.argv[1:]))
