"""Optional packages, imported where they are used; a missing one is an error that names the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from lockstep.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Imports and returns ``module``, or raises a MissingExtraError that says how to install it with ``extra``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        need = f", which {module} needs," if missing != module.partition(".")[0] else ""
        raise MissingExtraError(
            f"the package {missing!r}{need} is not installed; run: pip install 'torch-lockstep[{extra}]'"
        ) from error
