"""The path that a callback was given: never empty, which every file system takes for the working directory."""

from __future__ import annotations

import os
from typing import Any

from lockstep.errors import ConfigError


def given_path(path: Any, argument: str) -> str:
    """The path as a text.

    Args:
        path: a text or a ``pathlib.Path``.
        argument: its name in the message, such as "CSVLogger(filename)".

    Raises:
        ConfigError: it is empty, or no path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{argument} is {path!r}; give the path of a file or folder")
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"{argument} is {text!r}, which names nothing; give a path, or '.' if the working directory is meant"
        )
    return text
