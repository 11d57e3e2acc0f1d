"""The command ``lockstep``: one module for each top-level command. No other package imports this one.

entry_point  runs a command; errors become one line and an exit code. Begin reading here.
app          the tree of commands
flags        makes commands from dataclasses
training_command, training_flags  what all commands of ``lockstep train`` do; ``train`` has the commands
in_workers   what a command returns that is to run again in several workers
"""

from __future__ import annotations

from lockstep_tools.cli.entry_point import main

__all__ = ["main"]
