"""The life of a worker that runs a program: ``... -m lockstep.launch.worker FOLDER KIND TARGET ...``.

The program is ``__main__``, with its own ``sys.argv`` and ``sys.path``, as if Python had been started with it.
"""

from __future__ import annotations

import atexit
import faulthandler
import inspect
import multiprocessing
import multiprocessing.process
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.launch.failures import Record, stacks_noted, without_frames
from lockstep.launch.run_paths import (
    AGENT_VARIABLES,
    LIFELINE,
    error_path,
    pipe_path,
    record_path,
    semaphore_prefix,
    stacks_path,
)
from lockstep.parent_death import hang_on


def pack_call(fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes:
    """A call as bytes that a fresh process can unpack.

    A function of a module that a fresh process would not find by its name, such as a test's, travels by value, as one
    of a notebook or of ``__main__`` always does. What can be found by name is imported there.
    """
    import cloudpickle

    module = inspect.getmodule(fn)
    if module is None or module.__name__ == "__main__" or _is_found_by_name(module):
        return pack((fn, args, kwargs))
    cloudpickle.register_pickle_by_value(module)
    try:
        return pack((fn, args, kwargs))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def pack(value: object) -> bytes:
    """``value`` as bytes. Raises whatever its own classes raise when they are pickled."""
    import cloudpickle  # 40 ms, which a program in workers need not wait for

    payload: bytes = cloudpickle.dumps(value)
    return payload


def unpack(payload: bytes) -> Any:
    """What was packed, by this launch's own processes. Raises whatever its own classes raise when they are rebuilt."""
    import cloudpickle

    return cloudpickle.loads(payload)


def _is_found_by_name(module: ModuleType) -> bool:
    """Whether a fresh process with this one's ``sys.path`` would import the same file."""
    path = None
    spec: ModuleSpec | None = None
    parts = module.__name__.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:end]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)  # one that is built in has none
    return spec is not None and (file is None or spec.origin == file)


def _find_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What all workers of a launch are given.

    Args:
        payload: the function, its arguments and keyword arguments, packed.
        environment: the launcher's; the process that a worker was forked from may have an older one.
        share_variables: the names of those that say what a worker gets of the host.
        folder: where workers write down how they failed, and where their pipes are.
        until: when their time is up, on the clock of ``time.monotonic``; None for no limit.
    """

    payload: bytes
    environment: Mapping[str, str]
    share_variables: frozenset[str]
    folder: Path
    until: float | None = None


def occupy(call: Call) -> bytes | None:
    """Runs the function in this process, which the agent has given its variables. The target of the process.

    Returns:
        The chief's result, packed; None on the others.
    """
    os.setsid()  # Ctrl-C in the launcher's terminal reaches the launcher alone, which passes it on
    hang_on(os.environ[LIFELINE])
    # What the function starts is started as in any program: a DataLoader's processes, which would import torch anew in
    # the way that this one was started, took 6 s in place of 0.3.
    multiprocessing.set_start_method(None, force=True)
    _take_variables(call)
    worker, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    _redirect(call.folder, worker, attempt)
    try:
        fn, args, kwargs = unpack(call.payload)
        with stacks_noted(stacks_path(call.folder, worker, attempt), call.until):
            result = fn(*args, **kwargs)
        return _pack_result(result) if worker == 0 else None
    except BaseException as error:  # noqa: BLE001 - the function's own, whatever it is; the launcher raises it again
        _record(error, call.folder, worker, attempt)
        code = error.code if isinstance(error, SystemExit) else None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(code if isinstance(code, int) and code else 1)


def _take_variables(call: Call) -> None:
    """The launcher's variables, beside those of this worker that the agent has set."""
    own = AGENT_VARIABLES | call.share_variables
    given = {name: value for name, value in os.environ.items() if name in own}
    os.environ.clear()
    os.environ.update({**call.environment, **given})
    import torch  # a program that needs no torch starts without its two seconds of imports

    threads = os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
    if threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))  # OpenMP has been loaded, and reads its variable no more


def _redirect(folder: Path, worker: int, attempt: int) -> None:
    """Standard output and error, of what is written past Python too, into this worker's pipes."""
    for descriptor, stream in ((1, "out"), (2, "err")):
        pipe = os.open(pipe_path(folder, worker, attempt, stream), os.O_WRONLY)
        os.dup2(pipe, descriptor)
        os.close(pipe)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _pack_result(result: object) -> bytes:
    try:
        return pack(result)
    except Exception as error:
        error.add_note("the chief's result could not be sent to the launcher; return something that can be pickled")
        raise


def _record(error: BaseException, folder: Path, worker: int, attempt: int) -> None:
    """Writes down the error, itself where it can be packed, and its text."""
    record = Record.of(error, hide=(__file__,))
    try:
        error_path(folder, worker, attempt).write_bytes(pack(error.with_traceback(None)))
    except Exception:  # noqa: BLE001 - whatever the user's class does; the text is enough
        error_path(folder, worker, attempt).unlink(missing_ok=True)
    record.write(record_path(folder, worker, attempt))


MODULE, SCRIPT = "module", "script"
_FAILED_S = 3.0
"""How long the interpreter may take to go after a program that has failed; torch's groups wait for half an hour."""
_HIDDEN = (__file__, runpy.__file__ or "", "<frozen runpy>")


def main() -> None:
    """Runs the program that ``sys.argv`` names, and writes down the error that ends it."""
    hang_on(os.environ.pop(LIFELINE))  # before all else: the launcher may have ended meanwhile
    folder, kind, target, *arguments = sys.argv[1:]
    sys.argv = [target, *arguments]
    multiprocessing.process.current_process()._config["semprefix"] = semaphore_prefix(Path(folder))  # type: ignore[attr-defined]
    leave = _Leave()
    atexit.register(leave)  # before what the program registers, so that it is called after that
    try:
        _run(kind, target)
    except (SystemExit, KeyboardInterrupt) as end:
        leave.failed = not isinstance(end, SystemExit) or bool(end.code)
        if isinstance(end, SystemExit) and isinstance(end.code, str):
            _record_program(end, folder)
        raise
    except BaseException as error:  # noqa: BLE001 - the program's own, whatever it is; Python would print it too
        leave.failed = True
        _record_program(error, folder)
        shown = without_frames(error.__traceback__, _HIDDEN)
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        sys.exit(1)


class _Leave:
    """What a worker does last before the interpreter goes, when what the program has registered for that is done.

    Attributes:
        failed: whether the program did.
    """

    def __init__(self) -> None:
        self.failed = False

    def __call__(self) -> None:
        """Parts from torch's process groups, if the program has left that to the end of the process, as most do.

        A thread of gloo that still holds a tensor when the interpreter goes aborts the process: 8 of 50 processes that
        had just summed a tensor ended with SIGABRT, their work done, and none of 40 that had parted. To part is to wait
        for what was begun; the others may never take part in what a program that failed has begun, nor let it end.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return
        if self.failed:
            self._nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the process
            faulthandler.dump_traceback_later(_FAILED_S, exit=True, file=self._nowhere)
        else:
            distributed.destroy_process_group()


def _run(kind: str, target: str) -> None:
    if kind == MODULE:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(target).resolve().parent)
    runpy.run_path(target, run_name="__main__")


def _record_program(error: BaseException, folder: str) -> None:
    worker, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Record.of(error, hide=_HIDDEN).write(record_path(Path(folder), worker, attempt))


if __name__ == "__main__":
    main()
