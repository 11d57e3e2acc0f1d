"""``lockstep run``: a program in several worker processes, on one host or on many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lockstep.errors import ConfigError
from lockstep.launch.output import complain
from lockstep_tools.cli.entry_point import discard_broken_streams
from lockstep_tools.cli.flags import BEFORE_A_PROGRAM, command
from lockstep_tools.cli.in_workers import ResumeFlag, naming_what_resumes, nothing_saved

if TYPE_CHECKING:
    from lockstep.launch.elastic_meeting import Elastic
    from lockstep.launch.jobs import Outcome
    from lockstep.launch.rendezvous import Hosts


def add_to(app: typer.Typer) -> None:
    """Adds ``lockstep run``."""
    example = "Example: lockstep run --workers 4 train.py --epochs 5"
    app.command("run", epilog=example, context_settings=BEFORE_A_PROGRAM)(command(Run))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a program in several worker processes, on this host or together with others.

    The program's own arguments come after its name. Exit code: 0, or that of the first worker that failed.

    Args:
        program: a Python file; after -m, a module; or lockstep, for its own commands.
        arguments: the program's own arguments.
        workers: processes on this host. Default: one per GPU, or else 1. MIN:MAX starts MAX, and goes on with those
            that are left as long as all hosts together have MIN.
        module: PROGRAM is a module, as in python -m.
        hosts: all hosts, or the first with --nodes. Each runs this command.
        index: index of this host, from 0.
        nodes: number of hosts. Default: those in --hosts.
        gpus_per_worker: GPUs that each worker sees; 0 for none. Default: all.
        max_restarts: how often to restart all workers after a failure.
        output: whose output to show; every worker has a log.
        log_dir: each run makes a folder of its own in it.
        job: distinguishes jobs on several hosts. Default: the program and its arguments.
        rejoin_s: with MIN:MAX, seconds until lost workers start again and hosts that wait join. Default: 30.
        stop_s: seconds that workers have to save after SIGTERM.
        timeout_s: seconds to wait for the other hosts.
        quiet: print only the workers' output, and errors.
    """

    program: Annotated[str, typer.Argument(metavar="PROGRAM")]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS")] = None
    workers: Annotated[str | None, typer.Option("--workers", "-n", metavar="N|MIN:MAX")] = None
    module: Annotated[bool, typer.Option("--module", "-m")] = False
    hosts: Annotated[str | None, typer.Option(metavar="A:PORT,B:PORT")] = None
    index: Annotated[int | None, typer.Option(metavar="I")] = None
    nodes: Annotated[int | None, typer.Option(metavar="N")] = None
    gpus_per_worker: Annotated[int | None, typer.Option(metavar="N")] = None
    max_restarts: int = 0
    output: Literal["chief", "all"] = "chief"
    log_dir: Annotated[Path, typer.Option(metavar="DIR")] = Path("lockstep-logs")
    job: Annotated[str | None, typer.Option(metavar="NAME")] = None
    rejoin_s: Annotated[float | None, typer.Option(metavar="S")] = None
    stop_s: float = 30.0
    timeout_s: float = 600.0
    quiet: bool = False

    def __call__(self) -> int:
        from lockstep.launch.agent import Limits
        from lockstep.launch.jobs import Program, ProgramJob

        arguments = tuple(self.arguments or ())
        minimum, workers = _read_workers(self.workers)
        resume_flag: ResumeFlag = nothing_saved
        # The installed script would start another Python; as a module the command runs in the worker itself.
        is_lockstep = self.program == "lockstep" and not self.module and not Path(self.program).is_file()
        if is_lockstep:
            # Each of several hosts gives its own number of workers, so the total is not known here.
            possible = () if workers is None or self.hosts is not None else range(minimum or workers, workers + 1)
            checked = _check_command(arguments, possible)
            if isinstance(checked, int):
                return checked
            resume_flag = checked
        target = "lockstep_tools.cli" if is_lockstep else self.program
        program = Program(target=target, is_module=self.module or is_lockstep, arguments=arguments)
        hosts = self._hosts(self.job or program.job)
        launch = ProgramJob(
            program=program,
            hosts=hosts,
            elastic=self._elastic(minimum, workers, max(1, len(hosts.hosts))),
            workers=workers,
            gpus_per_worker=self.gpus_per_worker,
            max_restarts=self.max_restarts,
            limits=Limits(stop_s=self.stop_s),
            logs=self.log_dir.expanduser(),
            output=self.output,
        )
        try:
            with naming_what_resumes(resume_flag):
                return _report(launch.run((lambda line: None) if self.quiet else complain))
        finally:
            discard_broken_streams()

    def _elastic(self, minimum: int | None, maximum: int | None, hosts: int) -> Elastic | None:
        """How far the number of workers may change; None if one number was given, or none."""
        from lockstep.launch.elastic_meeting import Elastic

        if minimum is None or maximum is None:
            if self.rejoin_s is not None:
                raise ConfigError(f"--rejoin-s {self.rejoin_s:g} was given without --workers MIN:MAX; give both")
            return None
        # Refused here and not by the launchers, which would wait for more hosts until their time is up.
        if minimum > maximum * hosts:
            where = "this host" if hosts == 1 else f"the {hosts} hosts"
            raise ConfigError(
                f"--workers {minimum}:{maximum} was given, but MAX starts {maximum * hosts} on {where}; "
                "MIN must not be more"
            )
        return Elastic(minimum=minimum, maximum=maximum, rejoin_s=30.0 if self.rejoin_s is None else self.rejoin_s)

    def _hosts(self, job: str) -> Hosts:
        from lockstep.launch.rendezvous import Hosts

        if self.hosts is None and self.index is None and self.nodes is None:
            return Hosts(timeout_s=self.timeout_s)
        if self.hosts is None or self.index is None:
            raise ConfigError("--hosts and --index go together, and one was given; --hosts a:29500,b:29500 --index 0")
        named = [host.strip() for host in self.hosts.split(",")]
        if self.nodes is not None and len(named) not in (1, self.nodes):
            raise ConfigError(f"--nodes {self.nodes} was given, but --hosts names {len(named)}; name all, or the first")
        unnamed = [""] * ((self.nodes or 1) - 1) if len(named) == 1 else []
        return Hosts(hosts=(*named, *unnamed), index=self.index, job=job, timeout_s=self.timeout_s)


def _read_workers(text: str | None) -> tuple[int | None, int | None]:
    """MIN and MAX; MIN is None if one number was given, and so is MAX if none was."""
    if text is None:
        return None, None
    minimum, _, maximum = text.rpartition(":")
    try:
        return int(minimum) if ":" in text else None, int(maximum)
    except ValueError:
        raise ConfigError(f"--workers {text!r} was given, expected a number, or MIN:MAX as in 1:4") from None


def _check_command(arguments: Sequence[str], possible: Iterable[int]) -> int | ResumeFlag:
    """Parses a command of ours before any worker does, so that an error in it is printed once.

    ``possible`` are the numbers of workers that it may have to train with, as far as they are known. Returns the
    command's ResumeFlag, or an exit code if there is nothing to run.
    """
    from lockstep_tools.cli.app import parse  # imports this module
    from lockstep_tools.cli.training_command import TrainingCommand

    # test_what_is_wrong_with_its_words_is_said_once_and_no_worker_is_started.
    job = parse(arguments or ["--help"])
    if not isinstance(job, TrainingCommand):
        return job if isinstance(job, int) else nothing_saved
    for workers in possible:
        job.check(workers)
    return job.find_resume_flag()


def _report(outcome: Outcome) -> int:
    """Prints which worker failed, and how; returns the exit code."""
    if outcome.interrupted:
        raise KeyboardInterrupt
    for line in outcome.lines:
        complain(line)
    return outcome.exit_code
