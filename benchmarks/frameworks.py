"""The other frameworks that the field uses, each in an environment of its own, at the settings found best for a CPU.

``benchmarks/peers`` holds their programs, the pinned packages, and what other settings gave.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.programs import Program
from benchmarks.trial import Contender, Layout
from lockstep.errors import ConfigError

_LAYOUTS: Mapping[str, tuple[Layout, ...]] = {"mobilenetv2": ("channels_last", "contiguous"), "mlm": ("contiguous",)}
_DDP = "DDP over gloo, gradient_as_bucket_view, static_graph, no buffer broadcast"
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
_PROBE_LIMIT_S = 60.0
_PROBE = (
    "import json, sys; from importlib.metadata import version as v; print(json.dumps([v(n) for n in sys.argv[1:]]))"
)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the peers are."""

    environments: Path  # folder of virtual environments, one a peer, with its name
    programs: Path  # folder of their programs

    def python(self, peer: Peer) -> Path:
        return self.environments / peer.name / "bin" / "python"

    def script(self, peer: Peer) -> Path:
        return self.programs / f"train_{peer.name}.py"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A framework."""

    name: str  # of its environment, and the beginning of its contenders' names
    packages: tuple[str, ...]  # whose versions the report names


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
    python = places.python(peer)
    for path in (python, places.script(peer)):
        if not path.exists():
            raise ConfigError(
                f"{path} is not there; make bench SUITE=peers makes the environments, from the project's folder"
            )
    command = [str(python), "-c", _PROBE, *peer.packages]
    again = "remove its folder, then run make bench SUITE=peers"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise ConfigError(f"{python} lacks a package: {reason[0]}; {again}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} does not run: {error}; {again}") from error
    return ", ".join(f"{name} {is_}" for name, is_ in zip(peer.packages, json.loads(done.stdout), strict=True))


def contenders_of(peer: Peer, workload: str, places: Places) -> list[Contender]:
    """The contenders of a peer on a workload; none on one that its program does not know."""
    if workload not in _LAYOUTS:
        return []
    if peer.name == "tensorflow":
        return [_tensorflow(peer, places, replicas) for replicas in (2, 4, 1)]
    if peer.name == "jax":
        return [_jax(peer, places)]
    return [_torch(peer, places, layout) for layout in _LAYOUTS[workload]]


def _torch(peer: Peer, places: Places, layout: Layout) -> Contender:
    start: str = "Fabric.launch"
    arguments: tuple[str, ...] = ()
    if peer.name == "accelerate":
        start, arguments = "Accelerator.prepare under torchrun", _TORCHRUN
    return Contender(
        name=f"{peer.name}-2" + (" channels_last" if layout == "channels_last" else ""),
        settings=f"{start}, 2 processes, {_DDP}, cores // processes threads each, {layout}",
        launcher=Program(python=places.python(peer), script=places.script(peer), arguments=arguments),
        shares=2,
        processes=2,
        layout=layout,
        role="peer",
        peer=peer.name,
    )


def _tensorflow(peer: Peer, places: Places, replicas: int) -> Contender:
    how = f"MirroredStrategy on {replicas} logical CPU devices" if replicas > 1 else "one device, no strategy"
    return Contender(
        name=f"{peer.name}-{replicas}",
        settings=f"{how}, one process, strategy.run in a tf.function, oneDNN on, as many threads as TensorFlow "
        "chooses, no XLA, NHWC, the batches on their devices beforehand",
        launcher=Program(
            python=places.python(peer),
            script=places.script(peer),
            options={"intra": "0", "inter": "0", "xla": "no"},
            variables={"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"},
        ),
        shares=replicas,
        layout="framework",
        role="peer",
        peer=peer.name,
    )


def _jax(peer: Peer, places: Places) -> Contender:
    flags = "--xla_force_host_platform_device_count=2"
    return Contender(
        name=f"{peer.name}-2",
        settings=f"Keras's DataParallel on JAX, one process, {flags}, Model.train_on_batch, NHWC",
        launcher=Program(
            python=places.python(peer),
            script=places.script(peer),
            options={"loop": "train_on_batch", "data_format": "channels_last"},
            variables={"KERAS_BACKEND": "jax", "XLA_FLAGS": flags},
        ),
        shares=2,
        layout="framework",
        role="peer",
        peer=peer.name,
    )
