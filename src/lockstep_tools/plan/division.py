"""A division of training among devices, whether it is possible, and what each pipeline worker gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from lockstep.checks import alternatives, check_choice, check_least, divisors
from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import SCHEDULES, PipelineConfig, ScheduleName
from lockstep_tools.plan.model_shape import ModelShape

CheckpointingName = Literal["none", "full"]
CHECKPOINTING: tuple[CheckpointingName, ...] = get_args(CheckpointingName)
_MULTI_STAGE = ("interleaved", "zero_bubble", "zero_bubble_v")
_DEFAULT_STAGES = 2  # stages per worker that ``ls.ParallelStrategy`` makes for the schedules in _MULTI_STAGE


@dataclass(frozen=True, kw_only=True)
class Division:
    """One way to train on ``data * pipeline * tensor`` devices.

    Ranks run through the tensor axis first, then data, then pipeline, so that the devices that exchange most share a
    host (Narayanan et al. 2021, section 5.2).
    """

    data: int = 1  # number of copies of the model
    pipeline: int = 1  # number of workers that divide the layers
    tensor: int = 1  # number of devices that divide each layer
    microbatch_size: int = 1  # sequences in a microbatch
    microbatches: int = 1  # of each copy in a step
    schedule: ScheduleName = "1f1b"  # also without a pipeline
    stages_per_worker: int = 1
    activation_checkpointing: CheckpointingName = "none"  # "full": the backward pass recomputes whole layers
    shard_optimizer: bool = False  # the copies divide the optimizer state (ZeRO stage 1)
    # the copies divide weights and gradients too, and gather weights layer by layer (ZeRO stage 3, PyTorch's FSDP)
    shard_parameters: bool = False
    sequence_parallel: bool = False  # tensor ranks divide norms and dropout along the sequence

    def __post_init__(self) -> None:
        check_least(self, 1, "data", "pipeline", "tensor", "microbatch_size", "microbatches", "stages_per_worker")
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("activation_checkpointing", self.activation_checkpointing, CHECKPOINTING)
        if self.stages_per_worker > 1 and self.schedule not in _MULTI_STAGE:
            setting = f"stages_per_worker={self.stages_per_worker} was given with schedule={self.schedule!r}"
            raise ConfigError(f"{setting}, which has one stage per worker; choose schedule='interleaved'")

    @property
    def degrees(self) -> tuple[int, int, int]:
        return self.data, self.pipeline, self.tensor

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def batch(self) -> int:
        """Sequences in the global batch."""
        return self.data * self.microbatches * self.microbatch_size

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed later than input gradients."""
        return self.pipeline > 1 and self.schedule in ("zero_bubble", "zero_bubble_v")

    @property
    def options(self) -> int:
        """Number of options beyond degrees and microbatches."""
        options = (self.schedule != "1f1b", self.stages_per_worker > 1, self.activation_checkpointing != "none")
        return sum((*options, self.shard_optimizer, self.shard_parameters, self.sequence_parallel))

    def call(self) -> str:
        """The ``ls.ParallelStrategy(...)`` call that divides so, without defaults."""
        arguments = [f"data={self.data}", f"pipeline={self.pipeline}", f"tensor={self.tensor}"]
        if self.pipeline > 1:
            arguments.append(f"microbatches={self.microbatches}")
            if self.schedule != "1f1b":
                arguments.append(f'schedule="{self.schedule}"')
            if self.schedule in _MULTI_STAGE and self.stages_per_worker != _DEFAULT_STAGES:
                arguments.append(f"stages_per_worker={self.stages_per_worker}")
        options = ("shard_optimizer", "shard_parameters", "sequence_parallel")
        arguments += [f"{name}=True" for name in options if getattr(self, name)]
        return f"ls.ParallelStrategy({', '.join(arguments)})"


def why_indivisible(shape: ModelShape, *, data: int, pipeline: int, tensor: int, batch: int) -> str | None:
    """Why degrees do not divide a model and a global batch, with those that would; None if they do."""
    if pipeline > shape.layers:
        return f"pipeline={pipeline} is more stages than layers={shape.layers}; choose at most {shape.layers}"
    for degree, value, planned in (("tensor", tensor, shape.tensor_plan), ("pipeline", pipeline, shape.pipeline_plan)):
        if value > 1 and not planned:
            return (
                f"{degree}={value} needs a plan for {shape.name}, which transformers does not have; choose {degree}=1"
            )
    experts = (("tensor", tensor, "experts", shape.experts),) if shape.experts else ()
    for degree, value, name, size in (
        *(("tensor", tensor, name, getattr(shape, name)) for name in ("heads", "hidden", "feed_forward", "kv_heads")),
        *experts,
        ("data", data, "the global batch", batch),
    ):
        if size % value:
            return f"{degree}={value} does not divide {name}={size}; choose {alternatives(divisors(size))}"
    return None


@dataclass(frozen=True, kw_only=True)
class PipelineWorker:
    """One worker of a pipeline, or the only one."""

    layers: int  # number of layers in all its stages
    live_layers: float  # the largest number of layer activations that it holds at once, over layers and microbatches
    finished_layers: int  # how many of these belong to the microbatch whose backward pass ends first
    stages: int = 1  # number of its stages
    embedding: bool = True  # it has the embedding
    head: bool = True  # it has the head and the loss
    live_losses: int = 0  # number of microbatches whose loss activations it holds, beside the current one
    # number of backward passes of one stage whose weight gradients are outstanding, beside the current one
    pending: int = 0


def split_evenly(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """What ``split_layers`` of ``parallel.layer_split`` finds for equal layers, in a thousandth of the time.

    ``head`` is the cost of the head in the last stage, in layers.
    """
    if stages == 1:
        return (layers,)

    def cost(last: int) -> tuple[float, float, int]:
        """The slowest stage, then how uneven the stages are, then the most layers in the last stage."""
        share, larger = divmod(layers - last, stages - 1)
        rest = larger * (share + 1) ** 2 + (stages - 1 - larger) * share**2
        return max(share + (larger > 0), last + head), rest + (last + head) ** 2, -last

    last = min(range(1, layers - stages + 2), key=cost)
    share, larger = divmod(layers - last, stages - 1)
    return (*[share] * (stages - 1 - larger), *[share + 1] * larger, last)


def pipeline_workers(shape: ModelShape, division: Division) -> tuple[PipelineWorker, ...]:
    """The workers that can be the slowest or the fullest: the first, the first with most layers, and the last."""
    head = shape.vocabulary * shape.hidden / shape.layer_parameters
    return _workers(
        shape.layers, division.pipeline, division.microbatches, division.schedule, division.stages_per_worker, head
    )


@lru_cache(maxsize=4096)
def _workers(
    layers: int, workers: int, microbatches: int, schedule: ScheduleName, stages_per_worker: int, head: float
) -> tuple[PipelineWorker, ...]:
    if workers == 1:
        return (PipelineWorker(layers=layers, live_layers=layers, finished_layers=layers),)
    config = PipelineConfig(
        schedule=schedule, microbatches=microbatches, workers=workers, stages_per_worker=stages_per_worker
    )
    sizes = split_evenly(layers, config.stages, head)
    stage_sizes = [[sizes[stage] for stage in config.stages_of(worker)] for worker in range(workers)]
    totals = [sum(sizes_of_worker) for sizes_of_worker in stage_sizes]

    def live_layers(worker: int) -> float:
        live = live_microbatches(worker, config)
        if isinstance(live, tuple):
            return sum(size * times for size, times in zip(stage_sizes[worker], live, strict=True))
        return live * totals[worker] / stages_per_worker

    return tuple(
        PipelineWorker(
            layers=totals[worker],
            live_layers=live_layers(worker),
            finished_layers=stage_sizes[worker][0],
            stages=stages_per_worker,
            embedding=worker == 0,
            head=worker == config.last_worker,
            live_losses=microbatches - 1 if schedule == "gpipe" else 0,
            pending=min(worker, microbatches - 1) if schedule == "zero_bubble" else 0,
        )
        for worker in dict.fromkeys((0, totals.index(max(totals)), workers - 1))
    )


def live_microbatches(worker: int, config: PipelineConfig) -> int | tuple[int, int]:
    """The largest number of microbatches whose activations a worker holds at once, summed over its stages.

    A V gives one number per stage. Microbatches whose weight gradients are outstanding count: torch keeps all that is
    needed for them. A test replays the schedules of ``torch.distributed.pipelining``.
    """
    workers, microbatches, stages = config.workers, config.microbatches, config.stages_per_worker
    if config.schedule == "gpipe":
        return microbatches
    if config.schedule == "1f1b":
        return min(microbatches, workers - worker)
    if config.schedule == "zero_bubble_v":
        return min(microbatches, 2 * workers - 1 - worker), min(microbatches, worker + 1)
    # Korthikanti et al. 2022, section 4.2.3: the first worker holds L/p (1 + (p - 1)/(p m)) p layers.
    ahead = 2 * (workers - 1 - worker) + 1 if config.schedule == "interleaved" else workers
    round_size = microbatches // max(1, microbatches // workers)  # microbatches that a stage takes before the next
    return min(stages * microbatches, (stages - 1) * round_size + ahead)
