"""``lockstep run``: a program in several worker processes, on one host or on many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lockstep.cli.entry_point import discard_broken_streams
from lockstep.errors import ConfigError
from lockstep.launch.output import complain

if TYPE_CHECKING:
    from lockstep.launch.jobs import Outcome
    from lockstep.launch.rendezvous import Hosts

EXAMPLE = "Example: lockstep run --workers 4 train.py --epochs 5"

ProgramArgument = Annotated[
    str, typer.Argument(metavar="PROGRAM", help="A Python file; after -m, a module; or lockstep, for its own commands.")
]
ArgumentsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The program's own arguments.")
]
WorkersFlag = Annotated[
    int | None,
    typer.Option("--workers", "-n", metavar="N", help="Processes on this host. Default: one per GPU, or else 1."),
]
ModuleFlag = Annotated[bool, typer.Option("--module", "-m", help="PROGRAM is a module, as in python -m.")]
HostsFlag = Annotated[
    str | None,
    typer.Option("--hosts", metavar="A:PORT,B:PORT", help="All hosts. Each runs this command with its own --index."),
]
IndexFlag = Annotated[int | None, typer.Option("--index", metavar="I", help="Index of this host in --hosts, from 0.")]
RendezvousFlag = Annotated[
    str | None,
    typer.Option("--rendezvous", metavar="HOST:PORT", help="Where hosts meet that may join and leave; one of them."),
]
NodesFlag = Annotated[
    str | None,
    typer.Option("--nodes", metavar="MIN:MAX", help="Number of hosts that take part with --rendezvous: 2, or 1:4."),
]
GpusFlag = Annotated[
    int | None,
    typer.Option("--gpus-per-worker", metavar="N", help="GPUs that each worker sees; 0 for none. Default: all."),
]
RestartsFlag = Annotated[int, typer.Option("--max-restarts", help="How often to restart all workers after a failure.")]
OutputFlag = Annotated[
    Literal["chief", "all", "none"], typer.Option("--output", help="Whose output to show; every worker has a log.")
]
LogsFlag = Annotated[Path, typer.Option("--log-dir", metavar="DIR", help="Each run makes a folder of its own in it.")]
JobFlag = Annotated[
    str | None,
    typer.Option(
        "--job", metavar="NAME", help="Distinguishes jobs on several hosts. Default: the program and its arguments."
    ),
]
StopFlag = Annotated[float, typer.Option("--stop-s", help="Seconds that workers have to save after SIGTERM.")]
TimeoutFlag = Annotated[float, typer.Option("--timeout-s", help="Seconds to wait for the other hosts.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="Print only the workers' output, and errors.")]


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

        given = tuple(arguments or ())
        is_lockstep = program == "lockstep" and not module and not Path(program).is_file()
        if is_lockstep:
            exit_code = _check_command(given, workers if hosts is None and nodes is None else None)
            if exit_code is not None:
                return exit_code
        target = "lockstep.cli" if is_lockstep else program
        what = Program(target=target, is_module=module or is_lockstep, arguments=given)
        meeting = choose_meeting(hosts, index, rendezvous, nodes, job=job or what.job, timeout_s=timeout_s)
        launch = ProgramJob(
            program=what,
            hosts=meeting,
            workers=workers,
            gpus_per_worker=gpus_per_worker,
            max_restarts=max_restarts,
            limits=Limits(stop_s=stop_s),
            logs=log_dir.expanduser(),
            output=output,
        )
        try:
            return _report(launch.run((lambda line: None) if quiet else complain))
        finally:
            discard_broken_streams()

    return start


def _check_command(arguments: Sequence[str], workers: int | None) -> int | None:
    """Parses a command of ours before any worker does, so that an error in it is printed once.

    Args:
        arguments: the arguments after ``lockstep``.
        workers: number of workers in all; None if not known yet.

    Returns:
        The exit code if there is nothing to run, as after ``--help``; else None.
    """
    from lockstep.cli.app import parse  # imports this module
    from lockstep.cli.train import TrainingCommand

    job = parse(arguments or ["--help"])
    if workers is not None and isinstance(job, TrainingCommand):
        job.check(workers)
    return job if isinstance(job, int) else None


def choose_meeting(
    hosts: str | None, index: int | None, rendezvous: str | None, nodes: str | None, *, job: str, timeout_s: float
) -> Hosts:
    """How this launcher meets the others, from the flags.

    Raises:
        ConfigError: the flags contradict each other, or one is missing.
    """
    from lockstep.launch.rendezvous import ElasticHosts, FixedHosts, OneHost

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
        return ElasticHosts(address=rendezvous, least=least, most=most, job=job, timeout_s=timeout_s)
    return OneHost()


def parse_nodes(text: str) -> tuple[int, int]:
    """Parses the least and the greatest number of hosts: "1:4", or "2" for both.

    Raises:
        ConfigError: the text is neither.
    """
    least, colon, most = text.partition(":")
    if not least.isdecimal() or (colon and not most.isdecimal()):
        raise ConfigError(f"--nodes {text!r} was given, expected a number such as 2, or LEAST:MOST such as 1:4")
    return int(least), int(most if colon else least)


def _report(outcome: Outcome) -> int:
    """Prints which worker failed, and how; returns the exit code."""
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.last_output:
        last_output = outcome.last_output.rstrip("\n")
        complain(f"the last output of worker {outcome.worker}:\n{last_output}")
    if outcome.line is not None:
        complain(f"error: {outcome.line}")
    return outcome.exit_code
