"""``python -m benchmarks SUITE``: measures one suite on this machine and writes its report as Markdown and JSON."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import import_module
from pathlib import Path

from benchmarks.report import NothingToRunError, write_report
from benchmarks.trial import Conditions, Pace
from lockstep.errors import LockstepError
from lockstep_tools.scaling.machine import this_machine

SUITES: Mapping[str, tuple[str, str]] = {
    "cpu": ("benchmarks.suites.cpu", "step time and memory of replicas on a CPU beside hand-written loops and DDP"),
    "peers": ("benchmarks.suites.cpu", "the same beside Accelerate, Fabric, TensorFlow and JAX as well"),
    "steps": ("benchmarks.suites.steps", "what a small step costs beside the plain loop, DDP, Fabric and Lightning"),
    "compiled": ("benchmarks.suites.compiled", "compiled replicas beside compiled loops and DDP, fp32 and bf16"),
    "workers": ("benchmarks.suites.workers", "many workers beside DDP, on one host and on two joined by a slowed link"),
    "sums": ("benchmarks.suites.sums", "sums between workers in the order of the tree beside gloo's ring"),
    "trainer": ("benchmarks.suites.trainer", "our Transformers Trainer beside the original, on the recipe reviews"),
    "keras": ("benchmarks.suites.keras", "Keras on our replicas beside Keras alone, and on TensorFlow"),
    "memory": ("benchmarks.suites.memory", "peak memory that LoRA, bf16 and gradient checkpointing save"),
    "layouts": ("benchmarks.suites.layouts", "each worker's memory by layout of a sharded model, beside the estimate"),
    "start": ("benchmarks.suites.start", "from the start of a program to its first step, beside DDP under torchrun"),
    "control": ("benchmarks.suites.control", "how jobs of up to 1,024 members start, beat and notice a loss"),
    "gpu": ("benchmarks.gpu.suite", "one CUDA GPU: its tests, its rates, and our step beside others, in eight minutes"),
}
NOTHING_TO_RUN = 77  # Automake and Meson take this exit code for a skipped test.
_log = logging.getLogger("benchmarks")


def main(arguments: Sequence[str]) -> int:
    """Runs a suite.

    Returns:
        0; 1 where the suite could not run or its tests failed; 77 where there is no GPU to measure; 130 on Ctrl-C. A
        target that was missed is no failure: the report says so.
    """
    if not arguments or arguments[0] not in SUITES:
        return _explain(arguments)
    suite = import_module(SUITES[arguments[0]][0])
    parser = _parser(arguments[0], suite.PACE)
    if hasattr(suite, "flags"):
        suite.flags(parser)
    asked = parser.parse_args(arguments[1:])
    conditions = Conditions(
        date=date.today().isoformat(),
        machine=this_machine(),
        command=shlex.join(["python", "-m", "benchmarks", *arguments]),
        warm_up=asked.warm_up,
        steps=asked.steps,
        rounds=asked.rounds,
    )
    try:
        report = suite.measure(asked, conditions)
        _log.info("\n%s", report.text)
        path = write_report(asked.output, report)
    except NothingToRunError as error:
        _log.error("%s", error)
        return NOTHING_TO_RUN
    except LockstepError as error:
        _log.error("error: %s", error)
        return 1
    except KeyboardInterrupt:
        _log.error("interrupted")
        return 130
    _log.info("written to %s", path)
    return 0 if report.ok else 1


def _explain(arguments: Sequence[str]) -> int:
    """Lists the suites; an unknown one is an error."""
    suites = "\n".join(f"  {name:9s} {help}" for name, (_, help) in SUITES.items())
    parser = ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measures one suite and writes its report as Markdown and JSON.\n\nsuites:\n{suites}",
        epilog="python -m benchmarks SUITE --help lists the flags of a suite.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", metavar="SUITE", choices=tuple(SUITES), help="one of the above")
    parser.parse_args(arguments or ["--help"])
    return 0


def _parser(name: str, pace: Pace) -> ArgumentParser:
    """The flags that all suites have."""
    parser = ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=f"Measures {SUITES[name][1]}.",
        epilog=f"Example: python -m benchmarks {name} --rounds 1 --output runs/bench",
    )
    parser.set_defaults(suite=name)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows of the table to measure; all by default")
    parser.add_argument(
        "--rounds", type=int, default=pace.rounds, help=f"trials of each contender (default {pace.rounds})"
    )
    parser.add_argument("--steps", type=int, default=pace.steps, help=f"timed steps of a trial (default {pace.steps})")
    parser.add_argument(
        "--warm-up", type=int, default=pace.warm_up, help=f"steps before the timed ones (default {pace.warm_up})"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks"), help="folder of the report (default benchmarks)"
    )
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: processes and folders go first
    sys.exit(main(sys.argv[1:]))
