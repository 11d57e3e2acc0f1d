"""Optional packages, imported where they are used; a missing one is an error that names the extra to install."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from lockstep.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Imports and returns ``module``, or raises a MissingExtraError that says how to install it with ``extra``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The package may be installed and lack one of its own: pip has to be asked for that one.
        missing = (error.name or module).partition(".")[0]
        need = f", which {module} needs," if missing != module.partition(".")[0] else ""
        raise _missing(f"{missing!r}{need}", extra) from error


def find_package(package: str, extra: str) -> Path:
    """Returns the folder of an installed package without importing it, or raises as ``require`` does."""
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise _missing(repr(package), extra)
    return Path(*spec.submodule_search_locations)


def _missing(package: str, extra: str) -> MissingExtraError:
    return MissingExtraError(f"the package {package} is not installed; run: pip install 'torch-lockstep[{extra}]'")
