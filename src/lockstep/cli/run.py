"""``lockstep run``: a program in several worker processes, on one host or on many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lockstep.cli.failure import let_go_of_streams
from lockstep.errors import ConfigError
from lockstep.launch.output import complain

if TYPE_CHECKING:
    from lockstep.launch.jobs import Outcome
    from lockstep.launch.rendezvous import Meeting

EXAMPLE = "Example: lockstep run --workers 4 train.py --epochs 5"
OWN = "lockstep"
"""As a program: this command itself."""

ProgramArgument = Annotated[
    str, typer.Argument(metavar="PROGRAM", help="A Python file; after -m, a module; or lockstep, for its own commands.")
]
ArgumentsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The program's own command line.")
]
WorkersFlag = Annotated[
    int | None,
    typer.Option("--workers", "-n", metavar="N", help="Processes on this host. Without it: one per GPU, or else 1."),
]
ModuleFlag = Annotated[bool, typer.Option("--module", "-m", help="PROGRAM is a module, as after python -m.")]
HostsFlag = Annotated[
    str | None,
    typer.Option(
        "--hosts", metavar="A:PORT,B:PORT", help="All hosts, each of which runs this command with its own --index."
    ),
]
IndexFlag = Annotated[int | None, typer.Option("--index", metavar="I", help="This host's place in --hosts, from 0.")]
RendezvousFlag = Annotated[
    str | None,
    typer.Option("--rendezvous", metavar="HOST:PORT", help="Where hosts meet that may come and go; one of them."),
]
NodesFlag = Annotated[
    str | None,
    typer.Option("--nodes", metavar="MIN:MAX", help="How many hosts take part with --rendezvous: 2, or 1:4."),
]
GpusFlag = Annotated[
    int | None,
    typer.Option("--gpus-per-worker", metavar="N", help="GPUs that each worker sees; 0 for none. Without it: all."),
]
RestartsFlag = Annotated[int, typer.Option("--max-restarts", help="How often all are started again after a failure.")]
OutputFlag = Annotated[
    Literal["chief", "all", "none"], typer.Option("--output", help="Whose output is shown; every worker has a log.")
]
LogsFlag = Annotated[Path, typer.Option("--log-dir", metavar="DIR", help="Each run makes a folder of its own in it.")]
JobFlag = Annotated[
    str | None,
    typer.Option(
        "--job", metavar="NAME", help="Tells jobs apart on several hosts. Without it: the program and its arguments."
    ),
]
StopFlag = Annotated[float, typer.Option("--stop-s", help="Seconds that workers get after SIGTERM, to save.")]
TimeoutFlag = Annotated[float, typer.Option("--timeout-s", help="Seconds to wait for the other hosts.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="The workers' output alone, and errors.")]


def run(
    *,
    program: ProgramArgument,
    arguments: ArgumentsArgument = None,
    workers: WorkersFlag = None,
    module: ModuleFlag = False,
    hosts: HostsFlag = None,
    index: IndexFlag = None,
    rendezvous: RendezvousFlag = None,
    nodes: NodesFlag = None,
    gpus_per_worker: GpusFlag = None,
    max_restarts: RestartsFlag = 0,
    output: OutputFlag = "chief",
    log_dir: LogsFlag = Path("lockstep-logs"),
    job: JobFlag = None,
    stop_s: StopFlag = 30.0,
    timeout_s: TimeoutFlag = 600.0,
    quiet: QuietFlag = False,
) -> Callable[[], int]:
    """Run a program in several worker processes, on this host or together with others.

    The program's own arguments come after its name. Exit code: 0, or that of the first worker that failed.
    """

    def start() -> int:
        from lockstep.launch.agent import Limits
        from lockstep.launch.jobs import Program, ProgramJob

        words = tuple(arguments or ())
        own = program == OWN and not module and not Path(OWN).is_file()
        said = _read_own(words, workers if hosts is None and nodes is None else None) if own else None
        if said is not None:
            return said
        what = Program(target="lockstep.cli" if own else program, is_module=module or own, arguments=words)
        meeting = choose_meeting(hosts, index, rendezvous, nodes, job=job or what.job, timeout_s=timeout_s)
        launch = ProgramJob(
            program=what,
            meeting=meeting,
            workers=workers,
            gpus_per_worker=gpus_per_worker,
            max_restarts=max_restarts,
            limits=Limits(stop_s=stop_s),
            logs=log_dir.expanduser(),
            output=output,
        )
        try:
            return report(launch.run(_tell_nobody if quiet else complain))
        finally:
            let_go_of_streams()

    return start


def _read_own(words: Sequence[str], workers: int | None) -> int | None:
    """Reads words of our own before any worker does, so that what is wrong with them is said once.

    Args:
        words: after ``lockstep``.
        workers: in all; None where they are not known yet.

    Returns:
        None; or the exit code where all has been said already, as after ``--help``.
    """
    from lockstep.cli.app import parse  # which knows this command too
    from lockstep.cli.train import TrainingCommand

    job = parse(words or ["--help"])
    if workers is not None and isinstance(job, TrainingCommand):
        job.check(workers)
    return job if isinstance(job, int) else None


def choose_meeting(
    hosts: str | None, index: int | None, rendezvous: str | None, nodes: str | None, *, job: str, timeout_s: float
) -> Meeting:
    """How this launcher meets others, from the flags that say so.

    Raises:
        ConfigError: flags that do not go together, or say too little.
    """
    from lockstep.launch.rendezvous import ComingHosts, FixedHosts, OneHost

    if hosts is not None and rendezvous is not None:
        raise ConfigError("--hosts and --rendezvous were given, expected one of them; leave one out")
    if (hosts is None) != (index is None):
        raise ConfigError("--hosts and --index go together, and one was given; --hosts a:29500,b:29500 --index 0")
    if (rendezvous is None) != (nodes is None):
        raise ConfigError("--rendezvous and --nodes go together, and one was given; --rendezvous a:29500 --nodes 1:4")
    if hosts is not None and index is not None:
        listed = tuple(host.strip() for host in hosts.split(","))
        return FixedHosts(hosts=listed, index=index, job=job, timeout_s=timeout_s)
    if rendezvous is not None and nodes is not None:
        least, most = parse_nodes(nodes)
        return ComingHosts(address=rendezvous, least=least, most=most, job=job, timeout_s=timeout_s)
    return OneHost()


def parse_nodes(text: str) -> tuple[int, int]:
    """The least and the greatest number of hosts: "1:4", or "2" for both.

    Raises:
        ConfigError: anything else.
    """
    least, colon, most = text.partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()):
        raise ConfigError(f"--nodes {text!r} was given, expected a number such as 2, or LEAST:MOST such as 1:4")
    return int(least), int(most if colon else least)


def report(outcome: Outcome) -> int:
    """Says which worker failed, and how; returns the exit code."""
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.last_words:
        last_words = outcome.last_words.rstrip("\n")
        complain(f"the last words of worker {outcome.worker}:\n{last_words}")
    if outcome.line is not None:
        complain(f"error: {outcome.line}")
    return outcome.exit_code


def _tell_nobody(line: str) -> None:
    """``--quiet``."""
