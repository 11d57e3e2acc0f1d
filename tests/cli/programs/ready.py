"""A worker that says who it is and waits for a signal. With "saves" it handles SIGTERM as ``BackupAndRestore`` does.

It has been heard before it can save: from then on a round may end for lost workers to come back.
"""

import os
import signal
import sys

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit("no data"))
names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS")
print("ready", os.getpid(), *[os.environ[name] for name in names], flush=True)  # noqa: T201  the launcher passes it on
if "saves" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
while True:
    signal.pause()
