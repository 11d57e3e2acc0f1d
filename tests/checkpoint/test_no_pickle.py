"""Nothing in the package unpickles what it reads, unless torch is told to take weights only."""

from __future__ import annotations

import ast
from pathlib import Path

import lockstep

PACKAGE = Path(lockstep.__file__).parent
FOLDERS = (PACKAGE, PACKAGE.with_name("lockstep_tools"))
FORBIDDEN = {"pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.load"}
# What passes between a process and those that it starts itself, through pipes and files that only they can read.
STARTS_ITS_OWN = ("launch/", "verify/runner.py")


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def unpickles(path: str, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        safe = any(
            keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            for keyword in node.keywords
        )
        if (name in FORBIDDEN and not path.startswith(STARTS_ITS_OWN)) or (name == "torch.load" and not safe):
            found.append(f"{path}:{node.lineno}: {name}")
    return found


def test_the_scan_finds_what_it_looks_for():
    assert unpickles("a.py", "pickle.loads(x)") == ["a.py:1: pickle.loads"]
    assert unpickles("a.py", "torch.load(f)") == ["a.py:1: torch.load"]
    assert unpickles("a.py", "torch.load(f, weights_only=False)") == ["a.py:1: torch.load"]
    assert unpickles("a.py", "torch.load(f, weights_only=True)") == []


def test_nothing_is_unpickled():
    sources = {
        path.relative_to(folder).as_posix(): path.read_text() for folder in FOLDERS for path in folder.rglob("*.py")
    }
    assert [line for path, text in sources.items() for line in unpickles(path, text)] == []


def test_checkpoints_use_no_reader_that_unpickles():
    sources = "".join(path.read_text() for path in (PACKAGE / "checkpoint").glob("*.py"))
    assert "FileSystemReader" not in sources
    assert "pickle" not in sources.replace("no pickle", "")
