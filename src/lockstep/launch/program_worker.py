"""The life of a worker that runs a program: ``... -m lockstep.launch.program_worker FOLDER KIND TARGET ...``.

The program is ``__main__``, with its own ``sys.argv`` and ``sys.path``, as if Python had been started with it.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.process
import os
import runpy
import sys
from pathlib import Path

from lockstep.launch.failures import Record, without_frames
from lockstep.launch.places import LIFELINE, record_path, semaphore_prefix
from lockstep.lifeline import hang_on

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
            _record(end, folder)
        raise
    except BaseException as error:  # noqa: BLE001 - the program's own, whatever it is; Python would print it too
        leave.failed = True
        _record(error, folder)
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


def _record(error: BaseException, folder: str) -> None:
    worker, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Record.of(error, hide=_HIDDEN).write(record_path(Path(folder), worker, attempt))


if __name__ == "__main__":
    main()
