"""The life of a worker that runs a program: ``... -m lockstep.launch.program_worker FOLDER LAUNCHER KIND TARGET ...``.

The program is ``__main__``, with its own ``sys.argv`` and ``sys.path``, as if Python had been started with it.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from lockstep.launch.failures import Record, without_frames
from lockstep.launch.lifeline import end_with_parent
from lockstep.launch.places import record_path

MODULE, SCRIPT = "module", "script"
_HIDDEN = (__file__, runpy.__file__ or "", "<frozen runpy>")


def main() -> None:
    """Runs the program that ``sys.argv`` names, and writes down the error that ends it."""
    folder, launcher, kind, target, *arguments = sys.argv[1:]
    end_with_parent(int(launcher))
    sys.argv = [target, *arguments]
    try:
        _run(kind, target)
    except (SystemExit, KeyboardInterrupt) as end:
        if isinstance(end, SystemExit) and isinstance(end.code, str):
            _record(end, folder)
        raise
    except BaseException as error:  # noqa: BLE001 - the program's own, whatever it is; Python would print it too
        _record(error, folder)
        shown = without_frames(error.__traceback__, _HIDDEN)
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        sys.exit(1)


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
