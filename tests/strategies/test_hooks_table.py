"""docs/concepts/hooks.md says what hooks of every kind see on each layout; here each cell of its tables is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls

LIMIT_S = 200
PROGRAM = Path(__file__).parent / "programs" / "hooks.py"
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "hooks.md"
KINDS = {
    "module, forward": "forward",
    "module, backward": "backward",
    "`register_hook` on a parameter, before `ls.Model`": "gradient, before",
    "`register_post_accumulate_grad_hook`, before `ls.Model`": "accumulated, before",
    "`register_hook`, in `compile`'s function": "gradient, in compile",
    "`register_post_accumulate_grad_hook`, in `compile`'s function": "accumulated, in compile",
    "`register_hook` on a weight that the plan leaves whole, in `compile`'s function": (
        "gradient of a whole weight, in compile"
    ),
    "`optimizer.register_step_pre_hook`": "pre hook",
    "`optimizer.register_step_post_hook`": "post hook",
    "hooks of all optimizers (`register_optimizer_step_pre_hook`)": "all optimizers",
    "`optimizer.step = wrapped`": "replaced step",
    "`scheduler.step`": "scheduler",
}
COLUMNS = {
    "replicas of any kind": ("many workers", "data"),
    "`shard_optimizer`": ("shard_optimizer",),
    "`pipeline`": ("pipeline",),
    "`tensor`": ("tensor",),
    "`shard_parameters`": ("shard_parameters",),
}
SETTINGS = {"`accumulate=2`": {"accumulate": 2}, "`clip_norm`": {"clip_norm": 0.1}}


def tables(page: str) -> Iterator[dict[str, dict[str, str]]]:
    """Each table by the names of its rows and columns."""
    for block in page.split("\n\n"):
        if block.startswith("|"):
            head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
            yield {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.fixture(scope="module")
def by_layout() -> dict[str, dict[str, str]]:
    """What the page says of each kind, by layout."""
    table, *_ = tables(PAGE.read_text())
    return {
        layout: {KINDS[row]: cells[column] for row, cells in table.items()}
        for column, layouts in COLUMNS.items()
        for layout in layouts
    }


def test_the_page_has_a_row_for_each_kind_and_a_column_for_each_layout(program: Any, by_layout: Any):
    assert by_layout.keys() == program.LAYOUTS.keys()
    assert set(KINDS.values()) == set(program.KINDS)
    assert all(cells.keys() == set(program.KINDS) for cells in by_layout.values())


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_of_one_process(program: Any, by_layout: Any, replicas: int, make_strategy: Callable[..., Any]):
    strategy = make_strategy(replicas)
    assert {kind: program.observed(strategy, kind) for kind in program.KINDS} == by_layout["data"]


def test_a_divided_model_of_one_process(program: Any, by_layout: Any):
    strategy = ls.ParallelStrategy(seed=0, device="cpu:0")
    assert {kind: program.observed(strategy, kind) for kind in program.KINDS} == by_layout["data"]
    strategy.close()


@pytest.mark.workers
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    "layouts",
    [
        ("pipeline",),
        pytest.param(("many workers", "data", "shard_optimizer", "tensor", "shard_parameters"), marks=pytest.mark.slow),
    ],
)
def test_layouts_of_two_workers(program: Any, by_layout: Any, layouts: tuple[str, ...]):
    found = ls.launch(program.run_jobs, workers=2, args=(layouts,), timeout_s=LIMIT_S)
    for layout in layouts:
        seen = {
            kind: {cell for cell in cells if cell not in ("0", "0, warned")} for kind, cells in found[layout].items()
        }
        assert seen == {kind: {cell} for kind, cell in by_layout[layout].items()}


@pytest.mark.parametrize("replicas", [1, 2])
def test_settings_of_compile(program: Any, replicas: int, make_strategy: Callable[..., Any]):
    _, table, _ = tables(PAGE.read_text())
    strategy = make_strategy(replicas)
    kinds = {
        "hooks on parameters": ("gradient, before", "accumulated, before", "gradient, in compile"),
        "hooks of the optimizer": ("pre hook", "post hook", "all optimizers", "replaced step"),
    }
    for row, settings in SETTINGS.items():
        for column, names in kinds.items():
            for name in names:
                assert program.observed(strategy, name, **settings) == table[row][column], name


KINDS_IN_LOOPS = ["register_hook", "register_post_accumulate_grad_hook"]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("register", KINDS_IN_LOOPS)
def test_the_loop_of_one_replica_calls_hooks_on_parameters_as_torch_does(program: Any, register: str, early: bool):
    calls, weights = program.loop({}, register, "2.weight", early=early)
    assert calls == program.UPDATES
    torch.testing.assert_close(weights, dict(program.loop_by_hand(register, "2.weight")), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("register", KINDS_IN_LOOPS)
def test_tensor_ranks_call_them_on_weights_that_are_whole(program: Any, register: str):
    call = partial(program.loop, {"tensor": 2}, register, "2.bias", early=False)
    calls, weights = ls.launch(call, workers=2, timeout_s=LIMIT_S)
    assert calls == program.UPDATES
    torch.testing.assert_close(weights, dict(program.loop_by_hand(register, "2.bias")), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("grid", [{"tensor": 2}, {"data": 2}, {"data": 2, "shard_parameters": True}])
def test_loops_of_several_workers_refuse_the_others(program: Any, grid: dict[str, Any], early: bool):
    call = partial(program.loop, grid, "register_hook", "2.weight", early=early)
    with pytest.raises(ls.errors.ClusterError, match=r"UsageError: a parameter of shape .* has a hook"):
        ls.launch(call, workers=2, timeout_s=LIMIT_S)
