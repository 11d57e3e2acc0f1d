"""Suite ``compiled``: compiled replicas beside compiled loops and compiled DDP, in float32 and bfloat16.

    lockstep-2   lockstep-2 compiled   single compiled   ddp-2 compiled   ddp-2 compiled keeping

The loss is compiled as well, everywhere: by hand as one function with the module, ours as a function of its own. The
first round finds torch's cache of compiled code empty; later rounds start from it.
"""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import nn

from benchmarks.loops import SETTINGS, Variant, layouts_of, run_replicas, train_alone, train_ddp
from benchmarks.processes import SpawnedBody
from benchmarks.report import Report, columns, report_in_turn
from benchmarks.results import Comparison, Figures, compare_steps, fastest, with_role
from benchmarks.trial import Conditions, Contender, Layout, Pace, Workload, select_contenders
from benchmarks.workloads import USUAL_WORKLOADS, WORKLOADS
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.mlm.model import new_bert

PACE = Pace(warm_up=5, steps=12, rounds=3)
LIMIT = 0.95
"""Our step on two replicas, compiled or not, over that of the best compiled loop or DDP."""
SETTINGS_LIMIT = 1.0
"""Our step as it is by default over our compiled one."""
COMPILE_LIMIT_S = 600.0
_BF16, _KEEPING = " bf16", " keeping"


def contenders(workload: str, *, bf16: bool) -> tuple[Contender, ...]:
    """The contenders of one precision."""
    layout = layouts_of(workload)[0]
    compiled = Variant(compiled={}, bf16=bf16)
    return (
        _ours("lockstep-2", Variant(bf16=bf16), "not compiled, which is the default"),
        _ours("lockstep-2 compiled", compiled, "compile_module and loss compiled"),
        _alone(layout, compiled),
        _ddp(layout, compiled),
        _ddp(layout, compiled, keeping=True),
    )


def _ours(name: str, variant: Variant, how: str) -> Contender:
    return Contender(
        name=_named(name, variant),
        settings=f"MirroredStrategy, CPU split in 2, one process, memory_format auto, {how}",
        launcher=SpawnedBody(body=partial(run_replicas, variant=variant)),
        replicas=2,
        layout="auto",
        role="ours",
        limit_s=COMPILE_LIMIT_S,
    )


def _alone(layout: Layout, variant: Variant) -> Contender:
    return Contender(
        name=_named("single compiled", variant),
        settings=f"one process, all cores as intra-op threads, module and loss compiled as one function, {layout}",
        launcher=SpawnedBody(body=partial(train_alone, variant=variant)),
        replicas=1,
        layout=layout,
        limit_s=COMPILE_LIMIT_S,
    )


def _ddp(layout: Layout, variant: Variant, *, keeping: bool = False) -> Contender:
    allocator = ", with the allocator settings that our strategies make" if keeping else ""
    return Contender(
        name=_named(f"ddp-2 compiled{_KEEPING if keeping else ''}", variant),
        settings=f"2 processes, {SETTINGS}, around the compiled module, compiled loss, {layout}{allocator}",
        launcher=SpawnedBody(body=partial(train_ddp, keeping=keeping, variant=variant)),
        replicas=2,
        processes=2,
        layout=layout,
        role="reference" if keeping else "baseline",
        limit_s=COMPILE_LIMIT_S,
    )


def _named(name: str, variant: Variant) -> str:
    return name + _BF16 if variant.bf16 else name


def workload_of(name: str) -> Workload:
    """The workload, with shapes that are the same in every step, as compiling needs."""
    workload = WORKLOADS[name]
    return replace(workload, make_module=_bert_of_static_shapes) if name == "mlm" else workload


def _bert_of_static_shapes() -> nn.Module:
    bert = new_bert(MlmConfig())
    bert.static_shapes = True
    return bert


def comparisons_of(figures: Sequence[Figures]) -> list[Comparison]:
    """In each precision: ours over the best by hand, the default over our other settings, and what a cache saves."""
    return [
        comparison
        for bf16 in (False, True)
        for comparison in _comparisons_of([row for row in figures if row.contender.name.endswith(_BF16) == bf16])
    ]


def _comparisons_of(rows: Sequence[Figures]) -> Iterator[Comparison]:
    ours, best = with_role(rows, "ours"), fastest(with_role(rows, "baseline"))
    tuned = fastest(row for row in rows if _KEEPING in row.contender.name)
    for own in ours:
        yield compare_steps(own, best, LIMIT)
        yield compare_steps(own, tuned)
    if len(ours) == 2:
        default, compiled = ours
        yield compare_steps(default, compiled, SETTINGS_LIMIT)
        cold, *warm = sorted(compiled.samples, key=lambda sample: sample.round)
        starts = tuple(each.first_step_s / cold.first_step_s for each in warm)
        text = f"start to first step, {compiled.contender.name}, warm / cold cache"
        yield Comparison(text=text, values=starts)


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Keeps torch's cache of compiled code in a folder of this run's own, which the trials' processes inherit."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=USUAL_WORKLOADS, default=USUAL_WORKLOADS)
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Measures all contenders in turn."""

    def chosen(name: str) -> Sequence[Contender]:
        every = [each for precision in asked.precision for each in contenders(name, bf16=precision == "bf16")]
        return select_contenders(every, asked.only)

    work = [(workload_of(name), chosen(name)) for name in asked.workload]
    shown = columns("step ms", "p10", "p90", "CPU ms", "first step s", "peak MB", "loss")
    name = f"compiled-cpu-{conditions.machine.cores}"
    with _empty_cache():
        return report_in_turn(
            name, conditions, "Compiled steps on CPUs", work, shown, comparisons_of, meanings=_MEANINGS
        )


_MEANINGS = {
    "compiled": "the loss is compiled too: by hand as one function with the module, with DDP and ours as a function of "
    "its own. Rows of bf16 run forward and loss under autocast.",
    "keeping": "with the allocator settings that our strategies make, which DDP's users do not have by default.",
    "warm / cold cache": "the first round begins with an empty cache of compiled code, later rounds with what it left.",
}
