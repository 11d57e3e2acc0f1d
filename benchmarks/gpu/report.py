"""The GPU's tables: columns, comparisons and the head of the report. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.gpu.contenders import COMPILED, DDP, EAGER, FOUR, ONE, ONE_COMPILED
from benchmarks.gpu.gpu_tests import SuiteOutcome
from benchmarks.gpu.loops import DeviceType, Pace
from benchmarks.gpu.roofline import DeviceFacts, Roofline
from benchmarks.gpu.workloads import precision_of
from benchmarks.harness import Absence, Sample
from benchmarks.report import COLUMNS, Column, Section, legend, section_text
from benchmarks.results import Comparison, Figures, compare_steps, fastest, samples_of, step_ratio
from benchmarks.trial import Contender, Workload
from lockstep.scaling.machine import Machine

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
MAX_PEER_RATIO = 1.0
"""One replica's step over a peer's; it is to be below."""

_MEANINGS = {
    "models": "every contender trains the same modules, written in torch alone after transformers' (a test compares "
    "them), from the same weights, on the same batches in pinned memory, with Adam, `fused=True`. TF32 is allowed to "
    "all in fp32, and cuDNN looks for its fastest algorithms for all.",
    "step ms": "the median lap, divided by its number of steps. At the end of a lap the device is waited for, with all "
    "its streams, and never between. lowest, highest: of all laps of all rounds.",
    "/ best loop": "to the fastest hand-written loop of one process: the median over the rounds of the quotient of the "
    "two's median laps in the same round. Below 1 is faster.",
    "/ roofline": "to the larger of the two bounds above the table. That of the FLOPs holds for every program on this "
    "device. That of the bytes is the eager step's: each operator's inputs and outputs, as if no cache helped; fused "
    "operators move fewer, so compiled programs and graphs of them may be faster.",
    "ready s": "from the start of the processes to the end of the warm-up: CUDA, model, torch.compile, graph capture "
    "and the choice of kernels. torch and this package are imported already: each trial is forked, fresh, from a "
    "process that has done nothing else. It is no part of the step. Compiled code that an earlier run has left in "
    "torch's cache shortens it.",
    "torch's MB": "what torch's allocator has taken by the last step, of all processes; it keeps what it has once "
    "taken. on the GPU: what the driver says all processes had inside the last step, contexts and libraries included, "
    "without what others had before the run. The highest of all rounds.",
    "logged": "what the package logged, such as why whole steps were not captured as a CUDA graph; a row of ours on a "
    "GPU that logged nothing of graphs has captured them.",
    "loss": "the mean over all steps. Dropout masks, and batch statistics of each replica or process, differ.",
    "roofline": "FLOPs are counted by torch.utils.flop_counter on the meta device: matrix products and convolutions, "
    "forward and backward, attention as its plain products. The rates are those of products of 8192 x 8192 matrices "
    "and of copies of 1 GiB within the device, the best of three tries, in this run.",
}


def section_of(
    workload: Workload,
    contenders: Sequence[Contender],
    samples: Sequence[Sample],
    *,
    absences: Sequence[Absence] = (),
    facts: DeviceFacts,
) -> Section:
    """The table of a workload; samples and absences are those of all workloads, with the times of a step."""
    rows = [
        Figures(contender=contender, samples=own)
        for contender in contenders
        if (own := samples_of(samples, workload.name, contender.name))
    ]
    roofline = facts.roofline(workload.name)
    return Section(
        workload=workload.name,
        title=workload.title,
        columns=_columns(rows, roofline, facts.used_mb),
        figures=rows,
        comparisons=comparisons_of(workload, contenders, rows),
        absences=[absence for absence in absences if absence.workload == workload.name],
        remark="" if roofline is None else _roofline_text(workload, roofline, facts),
    )


def _columns(rows: Sequence[Figures], roofline: Roofline | None, used_before_mb: float) -> dict[str, Column]:
    best = fastest(_loops(rows))

    def used_mb(row: Figures) -> float:
        return max(0.0, max(sample.device_used_mb for sample in row.samples) - used_before_mb)

    return {
        "step ms": lambda row: f"{row.median_ms:.2f}",
        "lowest": lambda row: f"{min(row.steps):.2f}",
        "highest": lambda row: f"{max(row.steps):.2f}",
        "/ best loop": lambda row: "" if best is None else f"{step_ratio(row.samples, best.samples):.3f}",
        "/ roofline": lambda row: "" if roofline is None else f"{row.median_ms / roofline.ms:.3f}",
        "ready s": lambda row: f"{row.first_step_s:.1f}",
        "torch's MB": lambda row: f"{max(sample.device_reserved_mb for sample in row.samples):.0f}",
        "on the GPU MB": lambda row: f"{used_mb(row):.0f}",
        "loss": COLUMNS["loss"],
        "parameters": COLUMNS["parameters"],
        "rounds": lambda row: str(len(row.samples)),
    }


def _loops(rows: Sequence[Figures], name: str = "") -> list[Figures]:
    """The hand-written loops of one process whose names begin so."""
    return [
        row
        for row in rows
        if row.contender.role == "baseline" and row.contender.processes == 1 and row.contender.name.startswith(name)
    ]


def comparisons_of(
    workload: Workload, contenders: Sequence[Contender], rows: Sequence[Figures]
) -> tuple[Comparison, ...]:
    """What is compared on a workload; who did not run is in comparisons that were not measured."""
    own: Mapping[str, Figures] = {row.contender.name: row for row in rows}
    one, four, ddp = own.get(ONE), own.get(FOUR), own.get(DDP)
    eager, compiled = fastest(_loops(rows, EAGER)), fastest(_loops(rows, COMPILED))
    found = [compare_steps(one, eager, MAX_EAGER_RATIO, text=f"{ONE} / best eager loop")]
    tiny = workload.name.partition("-")[0] == "mlm"
    if tiny:
        best = None if compiled is None else fastest(_loops(rows))  # eager alone is not "the best" loop
        best_one = fastest(own[name] for name in (ONE, ONE_COMPILED) if name in own)
        found.append(compare_steps(best_one, best, MAX_BEST_RATIO, text=f"{ONE} or {ONE_COMPILED} / best loop"))
    found.append(compare_steps(four, one, MAX_FOUR_RATIO, text=f"{FOUR} / {ONE}, the same global batch"))
    found.append(compare_steps(four, ddp, MAX_DDP_RATIO, text=f"{FOUR} / {DDP}"))
    if tiny:
        values = () if four is None else tuple(median(sample.step_ms) for sample in four.samples)
        found.append(Comparison(text=f"{FOUR}, a step", values=values, limit=MAX_FOUR_MS, bound="below", unit=" ms"))
    for name in (contender.name for contender in contenders if contender.role == "peer"):
        found.append(compare_steps(one, own.get(name), MAX_PEER_RATIO, text=f"{ONE} / {name}", bound="below"))
    return tuple(found)


def _roofline_text(workload: Workload, roofline: Roofline, facts: DeviceFacts) -> str:
    cost, rate = facts.costs[workload.name], facts.matmul_flops[precision_of(workload.name)]
    return (
        f"The roofline of a step: {cost.flops / 1e9:.1f} GFLOP at {rate / 1e12:.1f} TFLOP/s are "
        f"{roofline.compute_ms:.2f} ms; the eager step's {cost.traffic_bytes / 1e9:.2f} GB at "
        f"{facts.copy_bytes_s / 1e9:.0f} GB/s are {roofline.traffic_ms:.2f} ms."
    )


@dataclass(frozen=True, kw_only=True)
class GpuConditions:
    """How a run was made."""

    date: str  # YYYY-MM-DD
    machine: Machine
    device: DeviceType
    facts: DeviceFacts
    command: str
    pace: Pace
    budget: str  # in a line
    spent_s: float  # on everything
    suite: SuiteOutcome | None  # outcome of the tests; None where they were not asked for


def render_gpu(conditions: GpuConditions, sections: Sequence[Section]) -> str:
    """The whole report. What a CPU takes is compared with no limit."""
    on_gpu = conditions.device == "cuda"
    shown = [section if on_gpu else Section(**{**vars(section), "comparisons": ()}) for section in sections]
    parts = [_head(conditions), _failures(conditions.suite), *map(section_text, shown), legend(_MEANINGS)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(conditions: GpuConditions) -> str:
    facts, pace = conditions.facts, conditions.pace
    title = f"# GPU benchmark, {conditions.date}: {facts.name}"
    if conditions.device == "cpu":
        title = f"# The GPU benchmark's programs tried on a CPU, {conditions.date}: no figure of a GPU"
    capability = f", compute capability {facts.capability}" if facts.capability else ""
    memory = f"{facts.memory_mb:.0f} MB{capability}; {facts.used_mb:.0f} MB were taken before the run"
    trial = f"{pace.warm_up} steps of warm-up, then {pace.laps} laps of {pace.lap_steps} steps"
    lines = (
        ("device", f"{facts.name}, {memory}"),
        ("its rates", _rates(facts)),
        *conditions.machine.facts,
        ("command", f"`{conditions.command}`"),
        ("tests that need a GPU", "not asked for" if conditions.suite is None else conditions.suite.text),
        ("budget", f"{conditions.budget}; spent {conditions.spent_s:.0f}"),
        ("measured", f"the contenders in turn, each in fresh processes; in each trial {trial}"),
    )
    return "\n".join([title, "", *(f"- {name}: {text}" for name, text in lines)])


def _rates(facts: DeviceFacts) -> str:
    rates = ", ".join(f"{precision} {rate / 1e12:.1f} TFLOP/s" for precision, rate in facts.matmul_flops.items())
    measured = f"matrix products {rates}; copies {facts.copy_bytes_s / 1e9:.0f} GB/s read and written"
    return "; ".join([*([measured] if rates else ["not measured"]), *([facts.trouble] if facts.trouble else [])])


def _failures(suite: SuiteOutcome | None) -> str:
    if suite is None or not suite.failed:
        return ""
    return "\n".join(["**Tests that failed**:", "", *(f"- {name}" for name in suite.failed)])
