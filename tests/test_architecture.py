"""Reads the source and holds the architecture: the order of rooms, where effects may happen, and how long things get.

The rules are functions from one parsed file to complaints, so that each rule is shown to bite on a made-up file before
the real tree is held to it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from tests.house import bound_names, is_no_noun

ROOT = Path(__file__).parents[1]
ENGINE, TOOLS = ROOT / "src" / "lockstep", ROOT / "src" / "lockstep_tools"

# A room may import from the rows above its own. Rooms of one row stand beside each other and do not see each other.
ROWS: tuple[frozenset[str], ...] = (
    frozenset({"tracebacks", "transformers_names"}),
    frozenset({"errors", "_torch_compat"}),
    frozenset(
        {
            *("checks", "extras", "atomic_files", "parent_death", "console", "introspection", "tensorflow_names"),
            "weights_formats",
        }
    ),
    frozenset({"config", "cluster"}),
    frozenset({"membership"}),
    frozenset({"collectives"}),
    frozenset({"replicas"}),
    frozenset({"mirroring", "parallel", "data"}),
    frozenset({"watch"}),
    frozenset({"strategies"}),
    frozenset({"checkpoint"}),
    frozenset({"train"}),
    frozenset({"integrations"}),
    frozenset({"launch"}),
    # From here on rooms of lockstep_tools, which the engine does not import.
    frozenset({"recipes", "report"}),  # one recipe trains with the Trainer of integrations
    frozenset({"doctor", "plan", "scaling", "verify"}),
    frozenset({"cli"}),
)
RANK = {room: rank for rank, rooms in enumerate(ROWS) for room in rooms}
FACADE = "lockstep"
PACKAGES = (ENGINE.name, TOOLS.name)
SEES_THE_FACADE = RANK["integrations"]

READS_ENVIRONMENT = (
    "console.py",  # NO_COLOR and TERM
    "cluster/",
    "doctor/",  # tells which variables are set
    "launch/",
    "tracebacks.py",  # LOCKSTEP_TRACEBACK
)
WRITES_FILES = (
    "atomic_files.py",
    "checkpoint/",
    "collectives/communicator.py",  # torch.save into memory: bytes for other workers
    "report.py",
    "scaling/plots.py",  # savefig writes the SVG to memory
    "train/callbacks/loggers.py",
    "train/callbacks/trace.py",  # into the file of atomic_file, beside what torch.profiler writes
    "train/learning_rate_finder.py",  # savefig writes the picture of a range test
    "train/torch_weights.py",  # torch.save for programs that read weights with torch.load
    "recipes/images/dataset.py",  # `lockstep data digits DIR` writes the pictures that it is asked for
    "launch/",  # a log file of each worker; how it failed, for the launcher to read
    "integrations/transformers/sync.py",  # the replicas' numbers beside transformers' own in its checkpoints
    "verify/runner.py",  # a folder for what the runs say, gone with them
)
PRINTS = (
    "cli/",
    "console.py",  # asks standard output what it is
    "doctor/devices.py",  # a program that tells its parent what it has found out
    "tracebacks.py",  # prints an uncaught error of ours in Python's place
    "train/callbacks/progress",
    "launch/output.py",  # passes on what the workers say
    "launch/worker.py",  # its own streams become pipes to the launcher
)
DRIVES_GPUS = (
    "doctor/devices.py",  # asks for the version of NCCL
    "replicas/device/driver.py",
    "scaling/",
)
MAX_FUNCTION_LINES = 60

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
ENVIRONMENT_CALLS = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
DRIVING_CALLS = {
    *("Stream", "Event", "stream", "current_stream", "set_stream", "synchronize", "graph", "CUDAGraph"),
    *("MemPool", "use_mem_pool", "empty_cache", "mem_get_info", "memory_snapshot", "memory_stats", "memory_allocated"),
    *("memory_reserved", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"),
}
WRITING_CALLS = {
    "torch.save",
    "os.replace",
    "os.rename",
    "os.makedirs",
    "os.mkdir",
    "numpy.save",
    "np.save",
    "numpy.savez",
    "np.savez",
    "shutil.copyfile",
}
WRITING_METHODS = {"write_text", "write_bytes", "mkdir", "savefig", "touch", "unlink", "save_file", "to_csv"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of the package: where it stands and its tree."""

    path: str  # relative to the package: "train/model.py"
    tree: ast.Module
    package: str = ENGINE.name

    @property
    def room(self) -> str:
        first = Path(self.path).parts[0].removesuffix(".py")
        return FACADE if first == "__init__" else first

    @property
    def module(self) -> str:
        parts = Path(self.package, self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(path: str, text: str, package: str = ENGINE.name) -> Source:
    return Source(path=path, tree=ast.parse(text), package=package)


@cache
def sources() -> list[Source]:
    return [
        parse(file.relative_to(package).as_posix(), file.read_text(), package.name)
        for package in (ENGINE, TOOLS)
        for file in sorted(package.rglob("*.py"))
    ]


def dotted(node: ast.AST) -> str:
    """``os.environ`` for the tree of it; an empty string for anything that is not a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """What a file imports of ours, with the line: also in functions, and for type hints only.

    A hint counts, because who reads a file reads what its hints name.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("import_module", "importlib.import_module"):
            names = [text.value for text in node.args[:1] if isinstance(text, ast.Constant)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] in PACKAGES)


def imported_rooms(source: Source) -> Iterator[tuple[int, str]]:
    """Rooms of ours that a file imports, with the line; the facade is called by its own name."""
    for line, name in imports(source):
        _, _, inside = name.partition(".")
        room = inside.partition(".")[0]
        yield line, room if room in RANK else FACADE


def circle(files: Iterable[Source]) -> list[str]:
    """The modules of one circle of imports, from each to the next; empty if there is none."""
    modules = {source.module: source for source in files}
    graph = {name: set(_imported_modules(source, modules)) - {name} for name, source in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        modules_of_circle: list[str] = error.args[1]
        return modules_of_circle[::-1]  # graphlib goes from what is imported to who imports it
    return []


def _imported_modules(source: Source, modules: Mapping[str, object]) -> Iterator[str]:
    for _, name in imports(source):
        yield name if name in modules else name.rpartition(".")[0]


def breaks_order(source: Source) -> Iterator[str]:
    if source.room == FACADE:
        yield from (f"{line}: the facade imports {room}" for line, room in imported_rooms(source) if room == "cli")
        return
    if source.room not in RANK:
        yield f"1: no room is called {source.room!r}"
        return
    rank = RANK[source.room]
    for line, room in imported_rooms(source):
        if room == FACADE:
            if rank < SEES_THE_FACADE:
                yield f"{line}: {source.room} imports the facade"
        elif room != source.room and RANK[room] >= rank:
            yield f"{line}: {source.room} imports {room}"


def uses_environment(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in ENVIRONMENT_CALLS:
            yield f"{node.lineno}: {dotted(node)}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (f"{node.lineno}: {a.name}" for a in node.names if f"os.{a.name}" in ENVIRONMENT_CALLS)


def writes_files(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else name
            if name in WRITING_CALLS or method in WRITING_METHODS or (method in ("open", "fdopen") and _mode(node)):
                yield f"{node.lineno}: {name or method}"


def _mode(call: ast.Call) -> bool:
    """Whether any text argument of an ``open`` is a mode that writes."""
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes)


def prints(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield f"{node.lineno}: print"
        if isinstance(node, ast.Attribute) and dotted(node) in ("sys.stdout", "sys.stderr"):
            yield f"{node.lineno}: {dotted(node)}"


def drives_gpus(source: Source) -> Iterator[str]:
    """What is asked of CUDA goes through the driver, so that it can be tested without a GPU."""
    for node in ast.walk(source.tree):
        name = dotted(node)
        if name.startswith("torch.cuda.") and name.removeprefix("torch.cuda.") in DRIVING_CALLS:
            yield f"{node.lineno}: {name}"  # type: ignore[attr-defined]


def uses_private_torch(source: Source) -> Iterator[str]:
    """Private names of torch stand in one module, where each is probed."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and _is_private_torch(name := dotted(node)):
            yield f"{node.lineno}: {name}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                if _is_private_torch(f"{node.module}.{alias.name}"):
                    yield f"{node.lineno}: {node.module}.{alias.name}"


def _is_private_torch(name: str) -> bool:
    first, *parts = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts)


def is_too_long(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines; expected at most {MAX_FUNCTION_LINES}"


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def is_a_drawer(source: Source) -> Iterator[str]:
    yield from (f"1: {part}" for part in Path(source.path).with_suffix("").parts if part in FORBIDDEN_NAMES)


def sleeps(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("time.sleep", "sleep"):
            yield f"{node.lineno}: {dotted(node.func)}"


Rule = Callable[[Source], Iterator[str]]
# rule, files that it does not hold for, a file that breaks it, the complaint
RULES: dict[str, tuple[Rule, tuple[str, ...], tuple[str, str], str]] = {
    "order": (
        breaks_order,
        (),
        ("data/shards.py", "from lockstep.train.model import Model\n"),
        "1: data imports train",
    ),
    "wall": (
        breaks_order,
        (),
        ("launch/api.py", "from lockstep_tools.report import Table\n"),
        "1: launch imports report",
    ),
    "beside": (
        breaks_order,
        (),
        ("recipes/mlm/train.py", "import lockstep_tools.report\n"),
        "1: recipes imports report",
    ),
    "deferred": (breaks_order, (), ("data/a.py", "def f():\n from lockstep_tools import cli\n"), "2: data imports cli"),
    "hint": (
        breaks_order,
        (),
        ("data/a.py", "if TYPE_CHECKING:\n from lockstep.train.model import Model\n"),
        "2: data imports train",
    ),
    "facade": (breaks_order, (), ("train/model.py", "import lockstep as ls\n"), "1: train imports the facade"),
    "unknown": (breaks_order, (), ("misc/a.py", ""), "1: no room is called 'misc'"),
    "environment": (uses_environment, READS_ENVIRONMENT, ("train/a.py", "os.environ['A']\n"), "1: os.environ"),
    "getenv": (uses_environment, READS_ENVIRONMENT, ("train/a.py", "from os import getenv\n"), "1: getenv"),
    "files": (writes_files, WRITES_FILES, ("train/a.py", "path.open('w')\n"), "1: path.open"),
    "mode": (writes_files, WRITES_FILES, ("train/a.py", "open(path, mode='ab')\n"), "1: open"),
    "save": (writes_files, WRITES_FILES, ("train/a.py", "torch.save(state, path)\n"), "1: torch.save"),
    "print": (prints, PRINTS, ("train/a.py", "print(1)\n"), "1: print"),
    "stderr": (prints, PRINTS, ("train/a.py", "sys.stderr.write('')\n"), "1: sys.stderr"),
    "driver": (drives_gpus, DRIVES_GPUS, ("data/a.py", "torch.cuda.Stream()\n"), "1: torch.cuda.Stream"),
    "private torch": (uses_private_torch, ("_torch_compat.py",), ("train/a.py", "torch._C\n"), "1: torch._C"),
    "private import": (
        uses_private_torch,
        ("_torch_compat.py",),
        ("train/a.py", "from torch.utils._pytree import tree_map\n"),
        "1: torch.utils._pytree.tree_map",
    ),
    "length": (
        is_too_long,
        (),
        ("train/a.py", "def f():\n" + "  g()\n" * 60),
        "1: f has 61 lines; expected at most 60",
    ),
    "drawer": (is_a_drawer, (), ("train/utils.py", ""), "1: utils"),
}


@pytest.mark.parametrize("name", RULES)
def test_the_rule_bites(name: str):
    rule, _, (path, text), complaint = RULES[name]
    assert list(rule(parse(path, text))) == [complaint]


@pytest.mark.parametrize("name", RULES)
def test_the_source_keeps_the_rule(name: str):
    rule, exempt, _, _ = RULES[name]
    found = [
        f"{s.path}:{complaint}" for s in sources() if not s.path.startswith(exempt or "\0") for complaint in rule(s)
    ]
    assert found == []


def test_reading_a_file_is_no_complaint():
    source = parse("data/shards.py", "open(path, 'rb')\npath.open()\n")
    assert list(writes_files(source)) == []


def test_no_files_import_each_other():
    assert " -> ".join(circle(sources())) == ""


@pytest.mark.parametrize(
    "back",
    [
        "from lockstep.train.a import A",
        "def f():\n from lockstep.train import a",
        "if TYPE_CHECKING:\n import lockstep.train.a",
        "def f():\n return import_module('lockstep.train.a')",
    ],
)
def test_a_circle_of_imports_is_seen(back: str):
    files = {"a": "from lockstep.train.b import B", "b": "from lockstep.train.c import C", "c": back}
    modules = circle([parse(f"train/{name}.py", text) for name, text in files.items()])
    assert sorted(set(modules)) == ["lockstep.train.a", "lockstep.train.b", "lockstep.train.c"]
    assert modules[0] == modules[-1]


def test_names_are_nouns():
    names = [name for source in sources() for name in bound_names(source.tree)]
    assert is_no_noun("_each")
    assert not is_no_noun("each_row")
    assert sum(map(is_no_noun, names)) <= 0.01 * len(names), Counter(filter(is_no_noun, names)).most_common(9)


def test_no_test_sleeps():
    files = {file.relative_to(ROOT).as_posix(): file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    found = [f"{path}:{complaint}" for path, text in files.items() for complaint in sleeps(parse(path, text))]
    assert list(sleeps(parse("a.py", "time.sleep(1)\n"))) == ["1: time.sleep"]
    assert found == []


def test_every_room_is_a_package_with_a_docstring():
    folders = {file.parent for package in (ENGINE, TOOLS) for file in package.rglob("*.py")}
    missing = [folder.name for folder in folders if not (folder / "__init__.py").exists()]
    assert missing == []


EXTRAS = (
    "numpy",
    "transformers",
    "tokenizers",
    "torchmetrics",
    "tqdm",
    "tensorboard",
    "typer",
    "safetensors",
    "matplotlib",
)


def test_importing_lockstep_needs_torch_alone():
    hide = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))"
    names = "[getattr(lockstep, name) for name in lockstep.__all__]"
    code = f"{hide}; import warnings; warnings.simplefilter('ignore'); import lockstep; print({names})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "MirroredStrategy" in done.stdout


FIT_ON_ONE_DEVICE = """
import sys
import torch
import lockstep as ls

module = torch.nn.Linear(2, 1)
model = ls.Model(module)
model.compile(torch.optim.SGD(module.parameters(), 0.1), torch.nn.MSELoss())
model.fit(torch.zeros(4, 2), torch.zeros(4, 1), verbose=0)
print(*sys.modules)
"""


def test_a_program_that_divides_no_model_does_not_wait_for_pipelines():
    command = [sys.executable, "-c", FIT_ON_ONE_DEVICE]
    imported = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    assert "lockstep.train.fit" in imported
    assert "torch.distributed.pipelining" not in imported


STEP_BY_HAND = """
import sys
import torch

module = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(module.parameters(), fused=True)
optimizer.zero_grad()
module(torch.zeros(4, 2)).sum().backward()
optimizer.step()
print(*sys.modules)
"""
STEP_ON_REPLICAS = """
import sys
import torch
import lockstep as ls

(cpu,) = ls.config.list_physical_devices("CPU")
ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration() for _ in range(2)])
strategy = ls.MirroredStrategy()
module = strategy.mirror(torch.nn.Linear(2, 1))
optimizer = strategy.mirror(torch.optim.Adam(module.parameters(), fused=True))

def step(x):
    optimizer.zero_grad()
    module(x).sum().backward()
    optimizer.step()

for x in strategy.distribute_dataset([torch.zeros(4, 2)]):
    strategy.run(step, args=(x,))
strategy.close()
print(*sys.modules)
"""


def packages_after(program: str) -> set[str]:
    """The packages, other than Python's own, that are imported at the end of a program, which prints its modules."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names


def test_a_step_on_replicas_imports_no_package_that_a_step_by_hand_does_not():
    assert packages_after(STEP_ON_REPLICAS) - packages_after(STEP_BY_HAND) == {"lockstep"}


def test_the_command_that_trains_does_not_import_what_its_recipes_may_not_need():
    late = {"transformers", "tokenizers", "torchmetrics", "scipy", "sklearn", "pandas", "matplotlib", "tensorboard"}
    assert packages_after("import sys, lockstep_tools.cli.train; print(*sys.modules)") & late == set()
