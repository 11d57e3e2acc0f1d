"""The life of a worker process: it takes its place, runs a function or a program, and reports what became of it.

A program runs as ``python -m lockstep.launch.worker FOLDER KIND TARGET ...``: it is ``__main__``, with its own
``sys.argv`` and ``sys.path``, as if Python had been started with it. This module imports no torch, so that a program
that needs no torch starts without its two seconds of imports.
"""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch import serialization
from lockstep.launch.failures import FailureRecord, without_frames
from lockstep.launch.hang_dump import dump_stacks_near
from lockstep.launch.serialization import deserialize, serialize
from lockstep.parent_death import die_with

GUARD_VARIABLE = "LOCKSTEP_PARENT_DEATH"
"""The environment variable with the path of the ``ParentDeathGuard`` that ends a worker with its launcher."""
OUTPUT_VARIABLE = "LOCKSTEP_OUTPUT"
"""The environment variable with the paths of the pipes for a worker's standard output and error."""
OWN_VARIABLE = "LOCKSTEP_OWN_VARIABLES"
"""The environment variable with the names of those that the launcher sets for each worker."""


class WorkerPaths:
    """The files of one attempt of one worker: "worker-1.log", and "worker-1.attempt-2.log" after two restarts.

    ``failure`` is the ``FailureRecord`` that the worker writes, ``error`` its pickled exception, ``stacks`` what its
    threads were doing when its time was up.
    """

    def __init__(self, folder: Path, worker: int, attempt: int) -> None:
        self.worker = worker
        stem = f"worker-{worker}" if attempt == 0 else f"worker-{worker}.attempt-{attempt}"
        self.log, self.failure = folder / f"{stem}.log", folder / f"{stem}.failure.json"
        self.error, self.stacks = folder / f"{stem}.failure.pickle", folder / f"{stem}.stacks.txt"


def semaphore_prefix(folder: Path) -> str:
    """The beginning of the names of multiprocessing's semaphores in the workers of a run, and in no other process."""
    return f"/lockstep-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"


MODULE, SCRIPT = "module", "script"
_EXIT_LIMIT_S = 3.0  # for the interpreter after a program has failed; torch's groups wait for half an hour
_HIDDEN = (__file__, runpy.__file__ or "", "<frozen runpy>")


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """What every worker of ``ls.launch`` is given."""

    payload: bytes  # the serialized function, arguments and keyword arguments
    # the launcher's environment; the process that a worker was forked from may have an older one
    environment: Mapping[str, str]
    folder: Path  # where workers write down how they failed
    deadline: float | None = None  # when their time is up, on the clock of ``time.monotonic``; None for no limit


def run_function(call: FunctionCall) -> bytes | None:
    """Runs the function, as the target of a worker's process. Returns the chief's serialized result, or else None."""
    os.setsid()  # Ctrl-C in the launcher's terminal reaches only the launcher, which passes it on
    die_with(os.environ[GUARD_VARIABLE])
    # What the function starts is started as in any program: a DataLoader's processes took 6 s in place of 0.3 when they
    # were started in the way that this one was, because they import torch anew.
    multiprocessing.set_start_method(None, force=True)
    _redirect_output(os.environ[OUTPUT_VARIABLE])
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - open as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    _take_environment(call)
    paths = _paths(call.folder)
    try:
        fn, args, kwargs = deserialize(call.payload)
        with dump_stacks_near(call.deadline, paths.stacks):
            result = fn(*args, **kwargs)
        if paths.worker != 0:
            return None
        try:
            return serialize(result)
        except Exception as error:
            error.add_note("the chief's result could not be sent to the launcher; return something that can be pickled")
            raise
    except BaseException as error:  # noqa: BLE001 - whatever the function raises; the launcher raises it again
        FailureRecord.of(error, hide=(__file__, serialization.__file__)).write(paths.failure)
        try:
            paths.error.write_bytes(serialize(error.with_traceback(None)))
        except Exception:  # noqa: BLE001 - whatever the user's class does; the text is enough
            paths.error.unlink(missing_ok=True)
        code = error.code if isinstance(error, SystemExit) else None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(code if isinstance(code, int) and code else 1)


def main() -> None:
    """Runs the program that ``sys.argv`` names, and writes down the error that ends it."""
    die_with(os.environ.pop(GUARD_VARIABLE))  # before all else: the launcher may have ended meanwhile
    _redirect_output(os.environ.pop(OUTPUT_VARIABLE))
    del os.environ[OWN_VARIABLE]
    folder, kind, target, *arguments = sys.argv[1:]
    paths = _paths(Path(folder))
    sys.argv = [target, *arguments]
    # multiprocessing names semaphores after this prefix, by default "/mp"; a name of our own tells the launcher which
    # are left of this run. There is no public function (Python 3.11).
    multiprocessing.current_process()._config["semprefix"] = semaphore_prefix(Path(folder))  # type: ignore[attr-defined]
    handler = _ExitHandler()
    atexit.register(handler)  # before the program registers anything, so that it is called last
    try:
        if kind == MODULE:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            # For ``-m`` Python has put the working directory there; a script expects its own folder, as under ``python
            # script.py``.
            sys.path[0] = str(Path(target).resolve().parent)
            runpy.run_path(target, run_name="__main__")
    except (SystemExit, KeyboardInterrupt) as end:
        handler.failed = not isinstance(end, SystemExit) or bool(end.code)
        if isinstance(end, SystemExit) and isinstance(end.code, str):
            FailureRecord.of(end, hide=_HIDDEN).write(paths.failure)
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the program raises; Python would print it too
        handler.failed = True
        FailureRecord.of(error, hide=_HIDDEN).write(paths.failure)
        user_frames = without_frames(error.__traceback__, _HIDDEN)
        sys.last_value = error  # as Python does; what is called at exit looks there
        # ``runpy`` and this function stand above the program's first frame; without them the traceback is that of
        # ``python script.py``.
        with suppress(SystemExit):  # the launcher knows by the record above who failed first
            sys.excepthook(type(error), error.with_traceback(user_frames), user_frames)
        sys.exit(1)


class _ExitHandler:
    """What a worker does last, after all exit handlers of the program: it destroys torch's process groups.

    A thread of gloo that still holds a tensor when the interpreter ends aborts the process: 8 of 50 processes that had
    just summed a tensor ended with SIGABRT though their work was done, and none of 40 that had destroyed their groups.
    Destroying a group waits for its operations in flight. After a failure the others may never take part in those, so
    the process only gets a time limit.
    """

    def __init__(self) -> None:
        self.failed = False

    def __call__(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return
        if self.failed:
            self._nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process
            # The watchdog of faulthandler is a thread in C: it ends the process though Python waits for a group, and
            # its dump goes to nowhere.
            faulthandler.dump_traceback_later(_EXIT_LIMIT_S, exit=True, file=self._nowhere)
        else:
            distributed.destroy_process_group()


def _paths(folder: Path) -> WorkerPaths:
    return WorkerPaths(folder, int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))


def _take_environment(call: FunctionCall) -> None:
    """Takes the launcher's environment, with the variables of this worker that the agent has set."""
    variables = {name: os.environ[name] for name in os.environ[OWN_VARIABLE].split()}
    os.environ.clear()
    os.environ.update({**call.environment, **variables})
    threads = os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
    if threads.isdecimal() and int(threads) > 0:
        import torch  # a function's process has it already

        torch.set_num_threads(int(threads))  # OpenMP is loaded and no longer reads its variable


def _redirect_output(pipes: str) -> None:
    """Sends standard output and error into this worker's pipes, also what is written without Python's streams."""
    for descriptor, path in enumerate(pipes.split(), start=1):
        pipe = os.open(path, os.O_WRONLY)
        os.dup2(pipe, descriptor)
        os.close(pipe)


if __name__ == "__main__":
    main()
