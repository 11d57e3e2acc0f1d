"""The command ``lockstep``: one module for each top-level command. No other package imports this one.

entry_point  runs a command; errors become one line and an exit code. Begin reading here.
app          the tree of commands
flags        makes flags from the fields of a dataclass
in_workers   starts a command again in worker processes
"""

from __future__ import annotations

from lockstep.cli.entry_point import main

__all__ = ["main"]
