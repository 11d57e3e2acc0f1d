"""Builds the sdist and the wheel, installs the wheel into a fresh environment, and trains with it there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, f'build_{sys.argv[1]}')('dist'))"


@cache
def required() -> set[tuple[str, str]]:
    """The top-level package and the extra of every ``require("package.module", "extra")`` in the source."""
    calls = (node for file in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    return {
        (node.args[0].value.partition(".")[0], node.args[1].value)
        for node in calls
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "require"
        and all(isinstance(argument, ast.Constant) for argument in node.args)
    }


def installed_by(extra: str) -> set[str]:
    """Distributions that an extra names, those of the extras in it included."""
    names: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        if own := re.fullmatch(r"torch-lockstep\[([\w,]+)\]", requirement):
            names |= {name for part in own[1].split(",") for name in installed_by(part)}
        else:
            names.add(re.match(r"[\w-]+", requirement)[0].lower())
    return names


@pytest.mark.parametrize("extra", sorted({extra for _, extra in required()}))
def test_an_extra_installs_what_the_source_requires_with_it(extra: str):
    distributions = {"mlflow": ["mlflow-skinny"], **packages_distributions()}  # which may not be installed here
    base = {"torch", "huggingface_hub"}  # transformers needs the latter
    packages = {package for package, name in required() if name == extra} - base
    missing = {p for p in packages if not {d.lower() for d in distributions.get(p, [p])} & installed_by(extra)}
    assert missing == set()


def run(*command: str | Path, folder: Path) -> str:
    """Runs a command without this environment's settings for Python; its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the newest setuptools; the packages of this one are found there, except lockstep.

    A path file names this environment's packages, so that torch is not downloaded again. The editable installation of
    lockstep is a path file among them, which Python does not read from there.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "setuptools>=77", folder=folder)
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture(scope="module")
def sdist(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from a copy of what git tracks, or would."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", folder=ROOT).split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    built = run(environment / "bin/python", "-c", BUILD, "sdist", folder=folder).split()[-1]
    return folder / "dist" / built


@pytest.fixture(scope="module")
def wheel(environment: Path, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist alone."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (project,) = folder.iterdir()
    built = run(environment / "bin/python", "-c", BUILD, "wheel", folder=project).split()[-1]
    return project / "dist" / built


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    expected = {
        str(file.relative_to(SOURCE)) for file in SOURCE.glob("lockstep*/**/*") if file.suffix not in ("", ".pyc")
    }
    assert wheel.name == f"torch_lockstep-{lockstep.__version__}-py3-none-any.whl"
    assert names == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_wheel_trains(environment: Path, wheel: Path, tmp_path: Path):
    run(environment / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", wheel, folder=tmp_path)
    found = run(environment / "bin/python", "-c", "import lockstep; print(lockstep.__file__)", folder=tmp_path)
    for part in ("train", "valid", "test"):
        lines = (f"{part} line {n} says that the {n % 7} replicas of step {n % 5} agree " * 3 for n in range(20))
        (tmp_path / f"small.{part}.tokens").write_text("\n".join(lines))
    sizes = "--layers 1 --hidden 16 --heads 2 --feed-forward 32 --vocabulary 100 --sequence-length 16 --batch-size 8"
    command = ["train", "mlm", "--data", tmp_path, *sizes.split(), "--devices", "cpu:2", "--epochs", "1"]
    said = run(environment / "bin/lockstep", *command, "--output", "out", folder=tmp_path)

    assert Path(found.strip()).is_relative_to(environment), found
    assert "masked language model on 2 logical devices" in said
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
