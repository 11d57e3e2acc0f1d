"""Every source file compiles under each supported Python that this machine has; what needs no package is imported.

Types for each version are checked by ``make check``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
VERSIONS = [found[1] for name in CLASSIFIERS if (found := re.fullmatch(r".*Python :: (3\.\d+)", name))]
IMPORT_ALL = """
import importlib, os, pathlib, pkgutil, lockstep, lockstep.errors, lockstep_tools
os.environ["KERAS_BACKEND"] = "torch"  # whatever ~/.keras/keras.json says
for package in (lockstep, lockstep_tools):
    for file in pathlib.Path(package.__file__).parent.rglob("*.py"):
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None):
        try:
            module.name.endswith("__main__") or importlib.import_module(module.name)
        except lockstep.errors.MissingExtraError:
            continue
        except ModuleNotFoundError as error:
            if error.name.startswith("lockstep"):
                raise
print("imported", lockstep.__version__)
"""


def interpreter(version: str) -> str | None:
    """A Python of that version that runs: on the path, or one of pyenv's."""
    candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", ""], capture_output=True, timeout=60, check=False).returncode == 0:
            return str(candidate)
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_the_source_is_of_every_supported_python(version: str):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"this machine has no Python {version}")
    command = [
        python,
        "-I",
        "-B",
        "-W",
        "error",
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{IMPORT_ALL}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported")
