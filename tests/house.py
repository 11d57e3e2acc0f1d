"""``make house``: what readers of the source count, beside the goals.

Names and comments are counted in the syntax trees and tokens of ``src``. Calls are counted in a step of a small model
on two replicas, by ``threading.setprofile_all_threads``: Python calls of functions of ``src/lockstep``.
"""

from __future__ import annotations

import ast
import io
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import lockstep as ls
from lockstep import console

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "src" / "lockstep"
PRONOUNS = frozenset(["each", "own", "others", "theirs", "mine", "ours", "there", "here", "these", "those", "every"])
PARTICIPLES = frozenset(
    [
        "found",
        "given",
        "known",
        "kept",
        "made",
        "done",
        "seen",
        "shown",
        "chosen",
        "used",
        "wanted",
        "taken",
        "sent",
        "asked",
        "held",
        "lost",
        "left",
        "met",
        "meant",
        "told",
        "needed",
        "gone",
        "put",
    ]
)
_PREFIX = f"{ENGINE}/"
_STEPS = 8  # before the one that is counted: the first ones look at the program
_DIRECTIVES = ("# type:", "# noqa", "# fmt:", "# pragma:", "#!")


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Every name that a file binds: variables, attributes, arguments, functions and classes, as often as it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def is_no_noun(name: str) -> bool:
    """Whether a name is a pronoun or a participle, which does not say what a thing is."""
    return name.strip("_") in PRONOUNS | PARTICIPLES


def lines_of_comments_and_code(text: str) -> tuple[int, int]:
    """The lines with a comment for readers, and the lines of code, without docstrings."""
    comments, code = set[int](), set[int]()
    layout = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    docstrings = _lines_of_docstrings(ast.parse(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if not token.string.startswith(_DIRECTIVES):
                comments.add(token.start[0])
        elif token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(comments), len(code - docstrings)


def _lines_of_docstrings(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


class CallCounter:
    """Counts calls of functions of the engine in every thread in which ``here`` was called.

    The first steps of a strategy set a profile function of their own in its threads, so ``here`` is for later ones.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.is_counting = False

    def here(self) -> None:
        """Counts in this thread from now on, until its end or ``sys.setprofile``."""
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if self.is_counting and event == "call" and file.startswith(_PREFIX):
            self.calls[f"{file.removeprefix(_PREFIX)}:{frame.f_code.co_qualname}"] += 1


def calls_of_a_step(replicas: int = 2) -> Counter[str]:
    """How often each function of the engine is called in one small step of an own loop on replicas."""
    ls.config.set_logical_device_configuration(
        ls.config.list_physical_devices("CPU")[0], [ls.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    )
    strategy = ls.MirroredStrategy(seed=0)
    module = strategy.mirror(nn.Sequential(*(nn.Linear(64, 64) for _ in range(5))))
    optimizer = strategy.mirror(torch.optim.Adam(module.parameters(), fused=True))
    counter = CallCounter()

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if number == _STEPS - 1:
            counter.here()
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y, reduction="none").mean(1)
        ls.compute_average_loss(loss, global_batch_size=32).backward()
        optimizer.step()
        return loss.detach()

    batches = strategy.distribute_dataset([(torch.randn(32, 64), torch.randn(32, 64))] * (_STEPS + 1))
    try:
        for number, batch in enumerate(batches):
            if number == _STEPS:
                counter.here()
                counter.is_counting = True
            strategy.run(step, args=(batch,))
            counter.is_counting = False
    finally:
        sys.setprofile(None)
        strategy.close()
    return counter.calls


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def calls_of_a_divided_step() -> list[Counter[str]]:
    """The same for a step of ``fit`` with tensor=2 and pipeline=2, on each of the four workers.

    The model is four blocks, the batch 32 rows in four microbatches. Workers 0 and 1 have the first stage, 2 and 3 the
    last one, and with it the loss.
    """
    counts: list[Counter[str]] = ls.launch(_calls_of_a_worker, workers=4, timeout_s=240)
    return counts


def _calls_of_a_worker() -> list[Counter[str]]:
    torch.set_num_threads(1)
    strategy = ls.ParallelStrategy(tensor=2, pipeline=2, seed=0)
    counter = CallCounter()

    step = 0

    def batch_begins(batch: int, _: object) -> None:
        nonlocal step
        step, counter.is_counting = batch, batch == _STEPS
        if batch == _STEPS:
            counter.here()

    def batch_ends(batch: int, _: object) -> None:
        counter.is_counting = False
        if batch == _STEPS:
            sys.setprofile(None)

    def here(*_: object) -> None:
        if step == _STEPS - 1:  # in the replica's thread, which the counted step then finds profiled from its begin
            counter.here()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets, reduction="none").mean(1)

    net = nn.Sequential(*(_Block() for _ in range(4)))
    for block in net:
        block.register_forward_pre_hook(here)
    with strategy.scope():
        model = ls.Model(strategy.parallelize(net, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}))
    model.compile(lambda parameters: torch.optim.Adam(parameters, fused=True), loss)
    callback = ls.callbacks.LambdaCallback(on_train_batch_begin=batch_begins, on_train_batch_end=batch_ends)
    model.fit([(torch.randn(32, 64), torch.randn(32, 64))] * (_STEPS + 1), verbose=0, callbacks=[callback])
    counts = [Counter[str]() for _ in range(4)]
    dist.all_gather_object(counts, counter.calls)  # torch's groups are those of the strategy, over all workers
    strategy.close()
    return counts


def frames_from_fit_to_forward() -> int:
    """Frames of the engine between the call of ``fit`` on two replicas and the forward pass in a replica's thread."""
    frames: list[int] = []

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frames.append(_frames_of_engine())
            return self.linear(x)

    strategy = ls.MirroredStrategy(["cpu:0"], replicas=2, seed=0)
    with strategy.scope():
        model = ls.Model(Probe())
    model.compile("sgd", "mse")
    model.fit(torch.zeros(64, 4), torch.zeros(64, 1), batch_size=8, epochs=2, verbose=0)
    strategy.close()
    return max(frames[-2:])


def _frames_of_engine() -> int:
    """Those on the stack of this thread, and of the main thread if that waits for this one."""
    frames = sys._current_frames()
    threads = {threading.get_ident(), threading.main_thread().ident or 0}
    return sum(
        frame.f_code.co_filename.startswith(_PREFIX) for thread in threads for frame, _ in walk_stack(frames[thread])
    )


def measures() -> Iterator[tuple[str, str, str]]:
    """What is counted, how much of it there is, and the goal."""
    from tests import test_architecture as architecture  # which reads names with this module

    files = architecture.sources()
    yield "circles of imports, type hints counted", f"{bool(architecture.circle(files)):d}", "0"
    yield "imports from a row below", f"{sum(1 for file in files for _ in architecture.breaks_order(file))}", "0"
    texts = [file.read_text() for file in sorted((ROOT / "src").rglob("*.py"))]
    names = [name for text in texts for name in bound_names(ast.parse(text))]
    counts = [lines_of_comments_and_code(text) for text in texts]
    comments, code = (sum(numbers) for numbers in zip(*counts, strict=True))
    engine = [file.read_text().count("\n") for file in ENGINE.rglob("*.py")]
    tests = [file.read_text().count("\n") for file in (ROOT / "tests").rglob("*.py")]
    calls = calls_of_a_step()
    yield "names that are pronouns or participles", f"{sum(map(is_no_noun, names)) / len(names):.1%}", "1.0%"
    yield "lines of comments, of lines of code", f"{comments / code:.1%}", "at least 4.0%"
    yield "lines of lockstep", f"{sum(engine):,}", "38,000"
    yield "modules of lockstep", f"{len(engine):,}", "210"
    yield "lines of tests", f"{sum(tests):,}", "55,000"
    yield "calls of one small step on two replicas", f"{sum(calls.values()):,}", "500"
    for worker, divided in enumerate(calls_of_a_divided_step()[1::2]):
        what = f"calls of one small step, tensor=2 x pipeline=2, {('first', 'last')[worker]} stage"
        yield what, f"{sum(divided.values()):,}", "1,100"
    yield "frames from fit to forward on two replicas", f"{frames_from_fit_to_forward():,}", "12"


if __name__ == "__main__":
    rows = [list(row) for row in measures()]
    sys.stdout.write(console.text_table(["measure", "now", "goal"], rows) + "\n")
