"""The GPU's table as Markdown. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.gpu.contenders import COMPILED, DDP, EAGER, FOUR, ONE, ONE_COMPILED
from benchmarks.gpu.gpu_tests import SuiteOutcome
from benchmarks.gpu.loops import DeviceType, Pace
from benchmarks.gpu.roofline import DeviceFacts, Floor
from benchmarks.gpu.workloads import precision_of
from benchmarks.harness import Absence, Sample
from benchmarks.results import paired_ratio
from benchmarks.trial import Contender, Workload
from lockstep.report import markdown_table
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
_TINY = "mlm"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender on one workload, over all its rounds."""

    contender: Contender  # who
    median_ms: float  # a step's, of all timed laps
    low_ms: float  # of the fastest lap
    high_ms: float  # of the slowest lap
    over_best: float | None  # to the best hand-written loop, round by round; None without one
    over_floor: float | None  # to the floor; None without one
    ready_s: float  # from the start of the processes to the end of the warm-up; median over the rounds
    reserved_mb: float  # what torch's allocators have taken of the GPU by the last step, of all processes; the highest
    used_mb: float  # what all processes had of it inside the last step, without what others had before; the highest
    loss: float  # mean over all steps, median over the rounds
    trained: int  # parameters that the optimizer changes
    rounds: int  # how many
    notes: tuple[str, ...] = ()  # what it said of itself


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """One target and what was measured."""

    text: str  # what is compared with what
    limit: float  # what the value is to be at most; below it, where ``below``
    value: float | None  # measured; None where something that it needs did not run
    below: bool = False  # whether the limit itself is too much
    unit: str = ""  # of limit and value; empty for a ratio

    @property
    def verdict(self) -> str:
        """``yes``, ``NO`` or ``not measured``."""
        if self.value is None:
            return "not measured"
        return "yes" if self.value < self.limit or (self.value == self.limit and not self.below) else "NO"


@dataclass(frozen=True, kw_only=True)
class GpuResult:
    """A workload and what its contenders did."""

    workload: Workload  # the work
    rows: tuple[Row, ...]  # one a contender that ran
    absences: tuple[Absence, ...]  # who did not
    floor: Floor | None  # of a step; None where the device's rates are not known
    targets: tuple[GpuTarget, ...]  # with what was measured


def result_of(
    workload: Workload,
    contenders: Sequence[Contender],
    samples: Sequence[Sample],
    *,
    absences: Sequence[Absence] = (),
    floor: Floor | None = None,
    used_before_mb: float = 0.0,
) -> GpuResult:
    """What came of a workload.

    Args:
        workload: which one.
        contenders: all that were asked for, in their order.
        samples: of all workloads, times a step's.
        absences: of all workloads.
        floor: of its step.
        used_before_mb: what others had of the device's memory before the run.
    """
    own = _by_contender(contenders, [sample for sample in samples if sample.workload == workload.name])
    best = _fastest(own, _rivals(contenders))
    rows = tuple(
        _row(contender, own[contender.name], best, floor, used_before_mb)
        for contender in contenders
        if contender.name in own
    )
    return GpuResult(
        workload=workload,
        rows=rows,
        absences=tuple(absence for absence in absences if absence.workload == workload.name),
        floor=floor,
        targets=targets_of(workload, contenders, own),
    )


def targets_of(
    workload: Workload, contenders: Sequence[Contender], own: dict[str, list[Sample]]
) -> tuple[GpuTarget, ...]:
    """The targets of a workload.

    Args:
        workload: which one.
        contenders: all that were asked for.
        own: the samples of those that ran, by name.
    """
    eager = _fastest(own, [name for name in _rivals(contenders) if name.startswith(EAGER)])
    compiled = _fastest(own, [name for name in _rivals(contenders) if name.startswith(COMPILED)])
    one, four, ddp = own.get(ONE), own.get(FOUR), own.get(DDP)
    best_one = _fastest(own, (ONE, ONE_COMPILED))
    tiny = workload.name.partition("-")[0] == _TINY
    others = [contender.name for contender in contenders if contender.role == "peer"]
    best = _fastest(own, _rivals(contenders)) if compiled is not None else None  # eager alone is not "the best" loop
    return (
        _ratio(f"{ONE} / best eager loop", MAX_EAGER_RATIO, one, eager),
        *([_ratio(f"{ONE} or {ONE_COMPILED} / best loop", MAX_BEST_RATIO, best_one, best)] if tiny else []),
        _ratio(f"{FOUR} / {ONE}, the same global batch", MAX_FOUR_RATIO, four, one),
        _ratio(f"{FOUR} / {DDP}", MAX_DDP_RATIO, four, ddp),
        *([_step_limit(f"{FOUR}, a step", four)] if tiny else []),
        *(_ratio(f"{ONE} / {name}", MAX_PEER_RATIO, one, own.get(name), below=True) for name in others),
    )


def _ratio(
    text: str, limit: float, ours: list[Sample] | None, theirs: list[Sample] | None, *, below: bool = False
) -> GpuTarget:
    value = None if ours is None or theirs is None else paired_ratio(ours, theirs)
    return GpuTarget(text=text, limit=limit, value=value, below=below)


def _step_limit(text: str, samples: list[Sample] | None) -> GpuTarget:
    value = None if samples is None else median(_steps(samples))
    return GpuTarget(text=text, limit=MAX_FOUR_MS, value=value, below=True, unit=" ms")


def _row(
    contender: Contender, own: list[Sample], best: list[Sample] | None, floor: Floor | None, used_before_mb: float
) -> Row:
    steps = _steps(own)
    return Row(
        contender=contender,
        median_ms=median(steps),
        low_ms=min(steps),
        high_ms=max(steps),
        over_best=None if best is None else paired_ratio(own, best),
        over_floor=None if floor is None else median(steps) / floor.ms,
        ready_s=median(sample.first_step_s for sample in own),
        reserved_mb=max(sample.device_reserved_mb for sample in own),
        used_mb=max(0.0, max(sample.device_used_mb for sample in own) - used_before_mb),
        loss=median(sample.loss for sample in own),
        trained=own[0].trained,
        rounds=len(own),
        notes=tuple(dict.fromkeys(note for sample in own for note in sample.notes)),
    )


def _by_contender(contenders: Sequence[Contender], samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each contender that has any."""
    found = {one.name: [sample for sample in samples if sample.contender == one.name] for one in contenders}
    return {name: own for name, own in found.items() if own}


def _rivals(contenders: Sequence[Contender]) -> list[str]:
    """The names of the hand-written loops of one process."""
    return [one.name for one in contenders if one.role == "rival" and one.processes == 1]


def _fastest(own: dict[str, list[Sample]], names: Sequence[str]) -> list[Sample] | None:
    there = [own[name] for name in names if name in own]
    return min(there, key=lambda samples: median(_steps(samples)), default=None)


def _steps(samples: Sequence[Sample]) -> list[float]:
    return [step for sample in samples for step in sample.step_ms]


_HEADINGS = (
    "contender", "step ms", "lowest", "highest", "/ best loop", "/ floor", "ready s", "torch's MB",
    "on the GPU MB", "loss", "parameters", "rounds",
)  # fmt: skip
_LEGEND = """\
## What the columns mean

- Every contender trains the same modules, written in torch alone after transformers' (a test compares them), from the
  same weights, on the same batches in pinned memory, with Adam, `fused=True`. TF32 is allowed to all in fp32, and cuDNN
  looks for its fastest algorithms for all.
- step ms: the median lap, by its number of steps. At the end of a lap the device is waited for, with all its streams,
  and never between. lowest, highest: of all laps of all rounds.
- / best loop: to the fastest hand-written loop of one process: the median over the rounds of the quotient of the two's
  median laps in the same round. Below 1 is faster.
- / floor: to the larger of the two floors above the table. That of the FLOPs is one for every program on this device.
  That of the bytes is the eager step's: each operator's inputs and outputs, as if no cache helped; fused operators move
  fewer, so compiled programs and graphs of them may go below it.
- ready: from the start of the processes to the end of the warm-up: CUDA, model, torch.compile, graph capture and the
  choice of kernels. torch and this package are imported already: each trial is forked, fresh, from a process that has
  done nothing else. It is no part of the step. Compiled code that an earlier run has left in torch's cache shortens it.
- torch's: what torch's allocator has taken by the last step, of all processes; it keeps what it has once taken. on the
  GPU: what the driver says that all processes have inside the last step, contexts and libraries included, less what
  was taken before the run.
- said: what the package logged, such as why whole steps were not recorded as a CUDA graph; a row of ours on a GPU that
  said nothing of graphs has recorded them.
- loss: the mean over all steps. Dropout masks, and batch statistics of each replica or process, differ.
- FLOPs are counted by torch.utils.flop_counter on the meta device: matrix products and convolutions, forward and
  backward, attention as its plain products. The rates are those of products of 8192 x 8192 matrices and of copies of
  1 GiB within the device, the best of three tries, in this run."""


@dataclass(frozen=True, kw_only=True)
class GpuConditions:
    """How a run was made."""

    date: str  # YYYY-MM-DD
    machine: Machine  # where
    device: DeviceType  # what kind of device it was run on
    facts: DeviceFacts  # what the device is
    command: str  # what was typed
    pace: Pace  # of every trial
    budget: str  # in a line
    spent_s: float  # on everything
    suite: SuiteOutcome | None  # what came of the tests; None where they were not asked for


def render_gpu(conditions: GpuConditions, results: Sequence[GpuResult]) -> str:
    """The whole report."""
    parts = [
        _head(conditions),
        _failures(conditions.suite),
        _targets(results) if conditions.device == "cuda" else "",
        *(_section(result, conditions.facts) for result in results),
        _LEGEND,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(conditions: GpuConditions) -> str:
    machine, facts, pace = conditions.machine, conditions.facts, conditions.pace
    title = f"# GPU benchmark, {conditions.date}: {facts.name}"
    if conditions.device == "cpu":
        title = f"# The GPU benchmark's programs tried on a CPU, {conditions.date}: no figure of a GPU"
    where = f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}"
    capability = f", compute capability {facts.capability}" if facts.capability else ""
    trial = f"{pace.warm_up} steps of warm-up, then {pace.laps} laps of {pace.lap_steps} steps"
    lines = (
        f"device: {facts.name}, {facts.memory_mb:.0f} MB{capability}; {facts.used_mb:.0f} MB were taken before the run",
        f"its rates: {_rates(facts)}",
        f"machine: {where}; load average before the run {machine.load:.2f}",
        f"versions: Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}",
        f"commit: {machine.commit}",
        f"command: `{conditions.command}`",
        f"tests that need a GPU: {'not asked for' if conditions.suite is None else conditions.suite.text}",
        f"{conditions.budget}; spent {conditions.spent_s:.0f}",
        f"the contenders in turn, each in fresh processes; in each trial {trial}",
    )
    return "\n".join([title, "", *(f"- {line}" for line in lines)])


def _rates(facts: DeviceFacts) -> str:
    rates = ", ".join(f"{precision} {rate / 1e12:.1f} TFLOP/s" for precision, rate in facts.matmul_flops.items())
    measured = f"matrix products {rates}; copies {facts.copy_bytes_s / 1e9:.0f} GB/s read and written"
    return "; ".join([*([measured] if rates else ["not measured"]), *([facts.trouble] if facts.trouble else [])])


def _failures(suite: SuiteOutcome | None) -> str:
    if suite is None or not suite.failed:
        return ""
    return "\n".join(["**Tests that failed**:", "", *(f"- {name}" for name in suite.failed)])


def _targets(results: Sequence[GpuResult]) -> str:
    rows = [
        [f"{result.workload.name}: {target.text}", _limit(target), _value(target), target.verdict]
        for result in results
        for target in result.targets
    ]
    return "## Targets\n\n" + markdown_table(("target", "limit", "measured", "reached"), rows) if rows else ""


def _limit(target: GpuTarget) -> str:
    return f"{'below' if target.below else 'at most'} {target.limit:.2f}{target.unit}"


def _value(target: GpuTarget) -> str:
    return "" if target.value is None else f"{target.value:.3f}{target.unit}"


def _section(result: GpuResult, facts: DeviceFacts) -> str:
    empty = [[absence.contender, "not run", *[""] * (len(_HEADINGS) - 2)] for absence in result.absences]
    blocks = [
        f"## {result.workload.title}",
        _floor_text(result, facts),
        markdown_table(_HEADINGS, [*(_row_of_markdown(row) for row in result.rows), *empty]),
        "\n".join(
            [
                *(f"- {row.contender.name}: {row.contender.settings}" for row in result.rows),
                *(f"- {row.contender.name} said: {note}" for row in result.rows for note in row.notes),
                *(f"- {absence.contender}: not run: {absence.reason}" for absence in result.absences),
            ]
        ),
    ]
    return "\n\n".join(block for block in blocks if block)


def _floor_text(result: GpuResult, facts: DeviceFacts) -> str:
    if result.floor is None:
        return ""
    cost = facts.costs[result.workload.name]
    rate = facts.matmul_flops[precision_of(result.workload)]
    return (
        f"The floor of a step: {cost.flops / 1e9:.1f} GFLOP at {rate / 1e12:.1f} TFLOP/s are "
        f"{result.floor.compute_ms:.2f} ms; the eager step's {cost.traffic_bytes / 1e9:.2f} GB at "
        f"{facts.copy_bytes_s / 1e9:.0f} GB/s are {result.floor.traffic_ms:.2f} ms."
    )


def _row_of_markdown(row: Row) -> list[str]:
    return [
        row.contender.name,
        *(f"{value:.2f}" for value in (row.median_ms, row.low_ms, row.high_ms)),
        *("" if value is None else f"{value:.3f}" for value in (row.over_best, row.over_floor)),
        f"{row.ready_s:.1f}",
        *(f"{value:.0f}" for value in (row.reserved_mb, row.used_mb)),
        f"{row.loss:.4f}",
        f"{row.trained:,}",
        str(row.rounds),
    ]
