"""At which settings each peer runs: what its documentation advises for a CPU, and the best of what was tried.

``benchmarks/peers/README.md`` has what the other settings gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.trial import Layout

_LAYOUTS: Mapping[str, tuple[Layout, ...]] = {"mobilenetv2": ("channels_last", "contiguous"), "mlm": ("contiguous",)}
_DDP = "DDP over gloo, gradient_as_bucket_view, static_graph, no buffer broadcast"


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """One way to run a peer's program.

    Args:
        text: for the table.
        shares: among how many replicas or processes the global batch is divided.
        processes: how many of its processes train.
        layout: memory format.
        suffix: of the contender's name.
        words: between the interpreter and the script.
        options: for the program.
        variables: environment variables.
    """

    text: str
    shares: int
    processes: int = 1
    layout: Layout = "framework"
    suffix: str = ""
    words: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def settings_of(peer: str, workload: str) -> list[PeerSettings]:
    """The settings of a peer on a workload; empty where its program does not know that workload."""
    if workload not in _LAYOUTS:
        return []
    if peer == "tensorflow":
        return [_tensorflow(replicas) for replicas in (2, 4, 1)]
    if peer == "jax":
        return [_jax(2)]
    return [_torch(peer, 2, layout) for layout in _LAYOUTS[workload]]


def _torch(peer: str, processes: int, layout: Layout) -> PeerSettings:
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    start, words = ("Accelerator.prepare under torchrun", torchrun) if peer == "accelerate" else ("Fabric.launch", ())
    return PeerSettings(
        text=f"{start}, {processes} processes, {_DDP}, cores // processes threads each, {layout}",
        shares=processes,
        processes=processes,
        layout=layout,
        suffix=" channels_last" if layout == "channels_last" else "",
        words=words,
    )


def _tensorflow(replicas: int) -> PeerSettings:
    how = f"MirroredStrategy on {replicas} logical CPU devices" if replicas > 1 else "one device, no strategy"
    return PeerSettings(
        text=f"{how}, one process, strategy.run in a tf.function, oneDNN on, as many threads as TensorFlow chooses, "
        "no XLA, NHWC, the batches on their devices beforehand",
        shares=replicas,
        options={"intra": "0", "inter": "0", "xla": "no"},
        variables={"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"},
    )


def _jax(devices: int) -> PeerSettings:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return PeerSettings(
        text=f"Keras's DataParallel on JAX, one process, {flags}, Model.train_on_batch, NHWC",
        shares=devices,
        options={"loop": "train_on_batch", "data_format": "channels_last"},
        variables={"KERAS_BACKEND": "jax", "XLA_FLAGS": flags},
    )
