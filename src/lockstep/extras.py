"""Optional packages, imported where they are used; a missing one is an error that names the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from lockstep.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Imports ``module``, a dotted name, which the extra of that name installs, and returns it.

    Raises:
        MissingExtraError: the module, or a package that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        need = f", which {module} needs," if missing != module.partition(".")[0] else ""
        raise MissingExtraError(
            f"the package {missing!r}{need} is not installed; run: pip install 'torch-lockstep[{extra}]'"
        ) from error
