"""The other frameworks that the field uses, each in an environment of its own, at the settings found best for a CPU.

``benchmarks/peers`` holds their programs, the pinned packages, and what other settings gave.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.programs import Program
from benchmarks.trial import Contender, Layout
from lockstep.errors import ConfigError

_LAYOUTS: Mapping[str, tuple[Layout, ...]] = {"mobilenetv2": ("channels_last", "contiguous"), "mlm": ("contiguous",)}
_DDP = "DDP over gloo, gradient_as_bucket_view, static_graph, no buffer broadcast"


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """One way to run a peer's program."""

    text: str  # for the table
    shares: int  # among how many replicas or processes the global batch is divided
    processes: int = 1  # how many of its processes train
    layout: Layout = "framework"  # memory format
    suffix: str = ""  # of the contender's name
    words: tuple[str, ...] = ()  # between the interpreter and the script
    options: Mapping[str, str] = field(default_factory=dict)  # for the program
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables


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


_PROBE_LIMIT_S = 60.0
_PROBE = (
    "import json, sys; from importlib.metadata import version as v; print(json.dumps([v(n) for n in sys.argv[1:]]))"
)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the peers are."""

    environments: Path  # folder of virtual environments, one a peer, of its name
    programs: Path  # folder of their programs

    def python(self, peer: str) -> Path:
        """The interpreter of a peer's environment."""
        return self.environments / peer / "bin" / "python"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A framework."""

    name: str  # of its environment, and the beginning of its contenders' names
    packages: tuple[str, ...]  # the ones whose versions are told

    @property
    def script(self) -> str:
        """The file name of its program."""
        return f"train_{self.name}.py"


PEERS = (
    Peer(name="accelerate", packages=("accelerate", "torch", "transformers")),
    Peer(name="fabric", packages=("lightning-fabric", "torch", "transformers")),
    Peer(name="tensorflow", packages=("tensorflow-cpu", "keras")),
    Peer(name="jax", packages=("keras", "jax")),
)


def versions_of(peer: Peer, places: Places) -> str:
    """The versions of a peer's packages, such as "keras 3.15.1, jax 0.10.2".

    Raises:
        ConfigError: the environment, a package in it, or the program is missing.
    """
    python, script = places.python(peer.name), places.programs / peer.script
    for path in (python, script):
        if not path.exists():
            raise ConfigError(
                f"{path} is not there; make bench SUITE=peers makes the environments, from the project's folder"
            )
    command = [str(python), "-c", _PROBE, *peer.packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigError(
            f"{python} lacks a package: {reason[0]}; remove its folder, then run make bench SUITE=peers"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{python} does not run: {error}; remove its folder, then run make bench SUITE=peers"
        ) from error
    return ", ".join(f"{name} {is_}" for name, is_ in zip(peer.packages, json.loads(done.stdout), strict=True))


def contenders_of(peer: Peer, workload: str, places: Places) -> list[Contender]:
    """The contenders of a peer on a workload; none on one that its program does not know."""
    return [
        Contender(
            name=f"{peer.name}-{chosen.shares}{chosen.suffix}",
            settings=chosen.text,
            launcher=Program(
                python=places.python(peer.name),
                script=places.programs / peer.script,
                words=chosen.words,
                options=chosen.options,
                variables=chosen.variables,
            ),
            shares=chosen.shares,
            processes=chosen.processes,
            layout=chosen.layout,
            role="peer",
            peer=peer.name,
        )
        for chosen in settings_of(peer.name, workload)
    ]
