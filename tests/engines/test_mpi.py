"""mpirun whose variables put each process on another host: MPI itself, through mpi4py, tells where process 0 is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="there is no mpi4py here; make test-engines installs it")

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "launched.py"
LIMIT_S = 120
# mpirun of Open MPI refuses root else.
ROOT_USER = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_MPI = ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none"]
LAUNCHERS = {
    "Open MPI": (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "libmpi.so.40"),
    "MPICH": (["mpirun.mpich"], "MPI_LOCALNRANKS", "libmpi.so.12"),
}

pytestmark = pytest.mark.workers


def launched(name: str, library: str, libraries: Path | None = None) -> subprocess.CompletedProcess[str]:
    command, local_size, _ = LAUNCHERS[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}; apt-get install openmpi-bin mpich")
    # The launcher sets this one for its processes, so a shell replaces it behind the launcher.
    script = f"export {local_size}=1; exec {sys.executable} {PROGRAM}"
    environment = {
        **os.environ,
        **ROOT_USER,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "MPI4PY_LIBMPI": library,
    }
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    return subprocess.run(
        [*command, "-n", "2", "sh", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_mpi_tells_the_address_where_no_variable_does(name: str, tmp_path: Path):
    # mpi4py's wheels want MPICH's library by its ABI's name, libmpi.so.12, which Debian's package does not give it.
    if name == "MPICH" and (library := find_library("mpich")) is not None:
        (tmp_path / "libmpi.so.12").symlink_to(next(Path("/usr/lib").glob(f"*/{library}")))
    done = launched(name, LAUNCHERS[name][2], tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert (first[:3], second[:3]) == ([0, 2, True], [1, 2, False])
    assert first[3] == second[3]


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("libmpi.so.40", "and mpi4py 0 of 1, since it uses another MPI (Open MPI"),
        (
            "libnone.so",
            "which could ask MPI for it, finds no MPI library (cannot load MPI library libnone.so",
        ),
    ],
)
def test_an_mpi4py_for_another_mpi_is_refused_in_one_line(library: str, message: str):
    done = launched("MPICH", library)
    assert done.returncode != 0
    assert not done.stdout.startswith("[")
    errors = [line for line in done.stderr.splitlines() if line.startswith("lockstep.errors.ClusterError: ")]
    assert len(errors) == 2
    assert all(message in line for line in errors)
    assert all(line.endswith("or give MASTER_ADDR and MASTER_PORT to all processes") for line in errors)
