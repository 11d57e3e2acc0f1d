"""A worker that waits for a signal."""

import os
import signal

print("ready", os.getpid(), flush=True)  # noqa: T201  the launcher passes it on
signal.pause()
