"""``import lockstep``: every name is there, and is imported when it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lockstep
from lockstep.launch.api import launch


def typed_imports() -> dict[str, str]:
    """What type checkers read: the module of every name that the facade imports for them alone."""
    tree = ast.parse(Path(lockstep.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    return {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def test_every_name_is_what_type_checkers_take_it_for():
    typed = typed_imports()
    assert sorted([*typed, "launch"]) == sorted(lockstep.__all__) == lockstep.__all__
    for name, module in typed.items():
        assert getattr(lockstep, name) is getattr(import_module(module), name), name


def test_a_function_is_not_hidden_by_the_package_of_its_name():
    import_module("lockstep.launch.jobs")
    assert lockstep.launch is launch


def test_a_name_that_it_does_not_have_is_said_to_be_missing():
    with pytest.raises(AttributeError, match=r"^module 'lockstep' has no attribute 'MirorredStrategy'$"):
        lockstep.MirorredStrategy  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'MirorredStrategy' from 'lockstep'"):
        exec("from lockstep import MirorredStrategy")


@pytest.mark.parametrize("does", ["import lockstep", "import lockstep.launch.worker", "dir(lockstep)"])
def test_torch_is_not_imported_until_it_is_needed(does: str):
    code = f"import lockstep, sys\n{does}\nprint('torch' in sys.modules, 'Model' in dir(lockstep))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("False True\n", "")


def test_all_of_it_comes_with_a_star():
    names: dict[str, object] = {}
    exec("from lockstep import *", names)
    assert names.keys() >= set(lockstep.__all__)
