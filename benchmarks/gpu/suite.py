"""Suite ``gpu``: one CUDA GPU, within a budget of seconds: tests that need it, its rates, then rounds of contenders.

|-- tests, at most their part --|-- rates --|-- round 1 --|-- round 2, if it fits --|

The report is written after the rates and again after each trial: whatever ends the run, what was measured is there.
"""

from __future__ import annotations

import logging
import multiprocessing
import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.device import DeviceFacts, count_flops, look_at_device, named_device
from benchmarks.gpu.gpu_tests import GpuTests, run_gpu_tests
from benchmarks.gpu.loops import (
    COMPILE_MODE,
    MEMORY_SHARE,
    DeviceType,
    Setting,
    train_ddp,
    train_ours,
    train_plain,
)
from benchmarks.gpu.workloads import FULL, TINY, gpu_workloads, precision_of
from benchmarks.harness import Absence, Rounds, run_rounds
from benchmarks.loops import layouts_of, suffix_of
from benchmarks.processes import SpawnedBody
from benchmarks.report import COLUMNS, Column, NothingToRunError, Report, Section, columns, report_of, write_report
from benchmarks.results import Comparison, Figures, compare_steps, fastest, figures_of, median_step
from benchmarks.trial import Conditions, Contender, Layout, Pace, Trial, Workload, select_contenders
from lockstep.checks import check_least
from lockstep.errors import ConfigError

PACE = Pace(warm_up=10, steps=10, rounds=3)
_LAPS = 3
ONE, FOUR, ONE_COMPILED, DDP = "lockstep-1", "lockstep-4", "lockstep-1 compiled", "ddp-4"
EAGER, COMPILED = "eager", "compiled"
_REPLICAS = 4
BUDGET_S = 480.0
"""Eight minutes, with everything."""
_LEAST_BUDGET_S = 60.0
_WRITING_S = 15.0
_RATES_LIMIT_S = 60.0
_TRIAL_LIMIT_S = 60.0
_COMPILED_LIMIT_S = 120.0
_TESTS_PART, _FILE_PART = 0.4, 0.2  # of the budget, for the tests of all files and of one
_LEAST_TORCH = (2, 11)
_log = logging.getLogger("benchmarks")


def contenders_for(workload: Workload, device: DeviceType) -> tuple[Contender, ...]:
    """The contenders in the order of importance: when the time runs out, the last ones are left out."""
    setting = Setting(device=device, precision=precision_of(workload.name))
    first, *others = layouts_of(workload.name)

    def contender(
        name: str, settings: str, body: Callable[..., None], *, replicas: int = 1, **fields: object
    ) -> Contender:
        options = {} if body is train_ddp else {"compiled": COMPILED in name}
        # Each trial is forked from a process that has imported this module alone.
        launcher = SpawnedBody(body=partial(body, setting=setting, **options), preloaded=__name__)
        limit_s = _COMPILED_LIMIT_S if COMPILED in name else _TRIAL_LIMIT_S
        common = {"name": name, "settings": settings, "launcher": launcher, "limit_s": limit_s}
        return Contender(**common, replicas=replicas, **fields)  # type: ignore[arg-type]

    def ours(name: str, where: str, replicas: int = 1) -> Contender:
        settings = f"MirroredStrategy on {where}, one process, Model.fit, memory_format auto"
        return contender(name, settings, train_ours, replicas=replicas, role="ours", layout="auto")

    def plain(name: str, how: str, layout: Layout) -> Contender:
        settings = f"a hand-written loop, {how}, {layout}, fused Adam, input copied one step ahead"
        return contender(name + suffix_of(layout), settings, train_plain, layout=layout)

    by_compiler = f"torch.compile of forward pass and loss, mode {COMPILE_MODE}"
    quarter = f"{_REPLICAS} logical devices, each with 1/{_REPLICAS} of {MEMORY_SHARE:.0%} of the GPU's memory"
    ddp = "DistributedDataParallel, processes that share the GPU, gloo, gradient_as_bucket_view, static_graph, no"
    return (
        ours(ONE, "the undivided GPU"),
        plain(EAGER, "eager", first),
        ours(FOUR, quarter, _REPLICAS),
        contender(
            DDP, f"{ddp} buffer broadcast, {first}", train_ddp, replicas=_REPLICAS, processes=_REPLICAS, layout=first
        ),
        plain(COMPILED, by_compiler, first),
        ours(ONE_COMPILED, "the undivided GPU, compile_module=True"),
        *(plain(EAGER, "eager", layout) for layout in others),
    )


MAX_EAGER_RATIO = 1.0
"""One replica's step over that of the best eager loop."""
MAX_BEST_RATIO = 0.7
"""One replica's step of bert_tiny over that of the best hand-written loop, torch.compile's included."""
MAX_FOUR_RATIO = 1.15
"""The step of four logical devices over that of the undivided GPU, on the same global batch."""
MAX_DDP_RATIO = 0.2
"""The step of four logical devices over that of four DDP processes on the same GPU."""
MAX_FOUR_MS = 20.0
"""bert_tiny's step on four logical devices; the published run took 240 ms on an RTX 4090."""
MAX_OF_LIMIT = 1.0
"""The most memory that one of four logical devices has taken, over its limit."""


def comparisons_of(workload: str, rows: Sequence[Figures]) -> list[Comparison]:
    """What is compared on a workload; who did not run is in comparisons that were not measured."""
    own: Mapping[str, Figures] = {row.contender.name: row for row in rows}
    one, four, ddp = own.get(ONE), own.get(FOUR), own.get(DDP)
    loops = [row for row in rows if row.contender.role == "baseline" and row.contender.processes == 1]
    eager, compiled = (
        fastest(row for row in loops if row.contender.name.startswith(name)) for name in (EAGER, COMPILED)
    )
    found = [
        compare_steps(one, eager, MAX_EAGER_RATIO, text=f"{ONE} / best eager loop"),
        compare_steps(four, one, MAX_FOUR_RATIO, text=f"{FOUR} / {ONE}, the same global batch"),
        compare_steps(four, ddp, MAX_DDP_RATIO, text=f"{FOUR} / {DDP}"),
    ]
    filled = () if four is None else tuple(sample.extra[0]["of_limit"] for sample in four.samples)
    found.append(Comparison(text=f"{FOUR}, memory of the fullest / its limit", values=filled, limit=MAX_OF_LIMIT))
    if workload.startswith("mlm"):
        best = None if compiled is None else fastest(loops)  # eager alone is not "the best" loop
        best_one = fastest(own[name] for name in (ONE, ONE_COMPILED) if name in own)
        values = () if four is None else tuple(map(median_step, four.samples))
        found += [
            compare_steps(best_one, best, MAX_BEST_RATIO, text=f"{ONE} or {ONE_COMPILED} / best loop"),
            Comparison(text=f"{FOUR}, a step", values=values, limit=MAX_FOUR_MS, bound="below", unit=" ms"),
        ]
    return found


_MEANINGS = {
    "models": "every contender trains the same modules, in torch alone, from the same weights, on the same batches in "
    "pinned memory, with Adam, `fused=True`. All may use TF32 in fp32, and cuDNN looks for its fastest algorithms.",
    "step ms": "the median lap, divided by its number of steps. At the end of a lap the device is waited for, with all "
    "its streams, and never between. lowest, highest: of all laps of all rounds.",
    "/ least": "to the time that the FLOPs of the step take at the rate of large matrix products, which no program can "
    "be faster than. FLOPs are counted by torch.utils.flop_counter: matrix products and convolutions, forward and "
    "backward. The rates are those of products of 8192 x 8192 matrices, the best of three tries, in this run.",
    "first step s": "from the start of the processes to the end of the warm-up: CUDA, model, torch.compile, graph "
    "capture and the choice of kernels. torch and this package are imported already, and compiled code that an earlier "
    "run has left in torch's cache shortens it.",
    "torch's MB": "what torch's allocator has taken by the last step, of all processes. on the GPU: what the driver "
    "says all processes had inside the last step, without what others had before the run.",
    "logged": "what the package logged, such as why whole steps were not captured as a CUDA graph; a row of ours on a "
    "GPU that logged nothing of graphs has captured them.",
    "loss": "the mean over all steps. Dropout masks, and batch statistics of each replica or process, differ.",
}


def section_of(
    workload: Workload, figures: Sequence[Figures], absences: Sequence[Absence], facts: DeviceFacts, *, compared: bool
) -> Section:
    """The table of a workload."""
    flops = count_flops(workload)
    least_ms = facts.least_ms(workload.name, flops)

    def reserved_mb(row: Figures) -> float:
        return row.over_rounds(lambda sample: sum(process["reserved_mb"] for process in sample.extra))

    shown: dict[str, Column] = {
        "step ms": lambda row: f"{row.median_ms:.2f}",
        "lowest": lambda row: f"{min(row.steps):.2f}",
        "highest": lambda row: f"{max(row.steps):.2f}",
        "ratio": COLUMNS["ratio"],
        "/ least": lambda row: "" if least_ms is None else f"{row.median_ms / least_ms:.2f}",
        "first step s": lambda row: f"{row.first_step_s:.1f}",
        "torch's MB": lambda row: f"{reserved_mb(row):.0f}",
        "on the GPU MB": lambda row: f"{max(0.0, row.most('used_mb') - facts.used_mb):.0f}",
        **columns("loss", "parameters"),
        "rounds": lambda row: str(len(row.samples)),
    }
    least = "" if least_ms is None else f", at least {least_ms:.2f} ms on this device"
    return Section(
        workload=workload.name,
        title=workload.title,
        columns=shown,
        figures=figures,
        comparisons=comparisons_of(workload.name, figures) if compared else (),
        absences=absences,
        remark=f"A step has {flops / 1e9:.1f} GFLOP{least}.",
    )


def reason_not_to_run() -> str:
    """Why nothing can be run here; empty where it can."""
    version = torch.__version__
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < _LEAST_TORCH:
        return f"torch {version} is older than {_LEAST_TORCH[0]}.{_LEAST_TORCH[1]}, which this package needs"
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"no CUDA GPU here: torch {version} is built without CUDA"
    return f"no CUDA GPU here: torch {version} sees none; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def flags(parser: ArgumentParser) -> None:
    """The flags of this suite."""
    parser.add_argument("--workload", nargs="+", choices=("mlm", "mobilenetv2"), default=("mlm", "mobilenetv2"))
    parser.add_argument("--tests", type=Path, help="folder of tests: first run those that need a GPU, as make gpu does")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=f"seconds for all (default {BUDGET_S:.0f})")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the programs at tiny sizes, without a GPU"
    )


def measure(asked: Namespace, conditions: Conditions) -> Report:
    """Runs the tests that need a GPU, measures the rates of GPU 0, and then the contenders while the budget lasts.

    ``--steps`` are those of a lap, at whose end the device is waited for.

    Raises:
        NothingToRunError: there is no GPU.
    """
    device: DeviceType = asked.device
    check_least(conditions, 1, "rounds", "warm_up", "steps")
    if not asked.budget_s >= _LEAST_BUDGET_S:
        raise ConfigError(f"budget_s={asked.budget_s:g} was given, expected at least {_LEAST_BUDGET_S:.0f}; raise it")
    if device == "cuda" and (reason := reason_not_to_run()):
        raise NothingToRunError(f"{reason}; nothing was run, no table was written")
    until_s = time.monotonic() + asked.budget_s - _WRITING_S
    wanted = wanted_contenders(device, asked.workload, asked.only)
    tests = None
    if asked.tests is not None:
        limit_s, file_limit_s = _TESTS_PART * asked.budget_s, _FILE_PART * asked.budget_s
        tests = run_gpu_tests(asked.tests.resolve(), limit_s=limit_s, file_limit_s=file_limit_s)
    found = device_facts(device, partial(look_at_device, device))
    facts = [
        ("device", found.text),
        ("tests that need a GPU", "not asked for" if tests is None else tests.text),
        ("budget", f"{asked.budget_s:.0f} s; rounds as long as a whole one fits"),
    ]
    described = replace(conditions, facts=tuple(facts))

    def report(rounds: Rounds) -> Report:
        return _report(described, device, found, wanted, rounds, tests)

    def write(rounds: Rounds) -> None:
        write_report(asked.output, report(rounds))

    write(Rounds(samples=(), absences=()))
    trials = trials_in_turn(wanted, conditions)
    return report(run_rounds(trials, rounds=conditions.rounds, until_s=until_s, after_each=write))


def _report(
    conditions: Conditions,
    device: DeviceType,
    found: DeviceFacts,
    wanted: Wanted,
    rounds: Rounds,
    tests: GpuTests | None,
) -> Report:
    """The tables of what was measured until now, and of the tests."""
    sections = []
    for workload, contenders in wanted:
        absences = [absence for absence in rounds.absences if absence.workload == workload.name]
        figures = figures_of(contenders, rounds.samples, workload.name)
        sections.append(section_of(workload, figures, absences, found, compared=device == "cuda"))
    name, title = "gpu-programs-tried-on-a-cpu", "The GPU benchmark's programs tried on a CPU: no figure of a GPU"
    if device == "cuda":
        slug = re.sub(r"[^a-z0-9]+", "-", found.name.lower()).strip("-")
        name, title = f"gpu-{slug}", f"GPU benchmark of {found.name}"
    report = report_of(name, conditions, title, sections, rounds.samples, meanings=_MEANINGS)
    if tests is None:
        return report
    text = f"{report.text}\n## Tests that need a GPU: {tests.text}\n\n{tests.table}\n"
    return replace(report, text=text, record={**report.record, "tests": asdict(tests)}, ok=report.ok and tests.ok)


Wanted = Sequence[tuple[Workload, Sequence[Contender]]]


def wanted_contenders(device: DeviceType, workloads: Sequence[str], only: Sequence[str] | None) -> Wanted:
    """The workloads that are wanted ("mlm", "mobilenetv2"), each with the contenders that are."""
    known = gpu_workloads(FULL if device == "cuda" else TINY)
    chosen = [workload for name, workload in known.items() if name.partition("-")[0] in workloads]
    every = [(workload, contenders_for(workload, device)) for workload in chosen]
    names = {each.name for each in select_contenders([each for _, of_one in every for each in of_one], only)}
    return [(workload, [each for each in of_one if each.name in names]) for workload, of_one in every]


def trials_in_turn(wanted: Wanted, conditions: Conditions) -> list[Trial]:
    """A round, one trial of each contender: what compiles comes last. The clock is read at the ends of laps."""
    warm_up, steps, cores = conditions.warm_up, conditions.steps, conditions.machine.cores
    trials = [
        Trial(workload=workload, contender=each, warm_up=warm_up, steps=_LAPS * steps, cores=cores, lap=steps)
        for workload, of_one in wanted
        for each in of_one
    ]
    return sorted(trials, key=lambda trial: COMPILED in trial.contender.name)


def device_facts(device: DeviceType, look: Callable[[], DeviceFacts]) -> DeviceFacts:
    """The device's rates; where they cannot be measured its name alone."""
    try:
        # In a process of its own, whose memory on the device ends with it, from the server that trials are forked from.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with context.Pool(1) as pool:
            return pool.apply_async(look).get(_RATES_LIMIT_S)
    except Exception as error:  # noqa: BLE001 - whatever it was, the trials may run
        _log.warning("the device's rates were not measured: %s: %s", type(error).__name__, error)
        return named_device(device)
