"""The other frameworks that the field uses, each in an environment of its own, at the settings found best for a CPU.

``benchmarks/peers`` holds their programs, the pinned packages, and what other settings gave.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.loops import layouts_of, suffix_of
from benchmarks.programs import Program
from benchmarks.trial import Contender, Layout
from lockstep.errors import ConfigError

ENVIRONMENTS = Path(".venv-peers")
"""Folder of their virtual environments."""
PROGRAMS = Path(__file__).with_name("peers")
PEERS: Mapping[str, tuple[str, ...]] = {
    "accelerate": ("accelerate", "torch", "transformers"),
    "fabric": ("lightning-fabric", "torch", "transformers"),
    "lightning": ("lightning", "torch"),
    "tensorflow": ("tensorflow-cpu", "keras"),
    "jax": ("keras", "jax"),
}
"""Each framework, by the name of its environment, and the packages whose versions the report names."""
_OF_STEPS = ("lightning",)
"""Those that the suite ``steps`` alone runs."""
_DDP = "DDP over gloo, gradient_as_bucket_view, static_graph, no buffer broadcast"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
_PROBE_LIMIT_S = 60.0
_PROBE = (
    "import json, sys; from importlib.metadata import version as v; print(json.dumps([v(n) for n in sys.argv[1:]]))"
)


def versions_of(peer: str) -> str:
    """The versions of a framework's packages, such as "keras 3.15.1, jax 0.10.2".

    Raises:
        ConfigError: the environment, or a package in it, is missing.
    """
    python, packages = _python(peer), PEERS[peer]
    suite = "steps" if peer in _OF_STEPS else "peers"
    again = f"make bench SUITE={suite} makes the environments, from the project's folder"
    if not python.exists():
        raise ConfigError(f"{python} is not there; {again}")
    command = [str(python), "-c", _PROBE, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise ConfigError(f"{python} lacks a package: {reason[0]}; remove its folder, then {again}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} does not run: {error}; remove its folder, then {again}") from error
    return ", ".join(f"{name} {is_}" for name, is_ in zip(packages, json.loads(done.stdout), strict=True))


def peers_of(workload: str) -> list[Contender]:
    """The contenders of all frameworks on a workload; none on one that their programs do not know."""
    if workload not in ("mobilenetv2", "mlm"):
        return []
    flags = "--xla_force_host_platform_device_count=2"
    return [
        *(
            _on_torch("accelerate", "Accelerator.prepare under torchrun", TORCHRUN, each)
            for each in layouts_of(workload)
        ),
        *(_on_torch("fabric", "Fabric.launch", (), each) for each in layouts_of(workload)),
        *(_tensorflow(replicas) for replicas in (2, 4, 1)),
        _peer(
            "jax",
            f"Keras's DataParallel on JAX, one process, {flags}, Model.train_on_batch, NHWC",
            variables={"KERAS_BACKEND": "jax", "XLA_FLAGS": flags},
        ),
    ]


def _peer(
    peer: str, settings: str, *, suffix: str = "", replicas: int = 2, variables: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (), **fields: Any,
) -> Contender:  # fmt: skip
    script = PROGRAMS / f"train_{peer}.py"
    launcher = Program(python=_python(peer), script=script, arguments=arguments, variables=variables or {})
    name, parts = f"{peer}-{replicas}{suffix}", {"layout": "framework", **fields}
    return Contender(
        name=name, settings=settings, launcher=launcher, replicas=replicas, role="peer", peer=peer, **parts
    )


def _on_torch(peer: str, start: str, arguments: tuple[str, ...], layout: Layout) -> Contender:
    settings = f"{start}, 2 processes, {_DDP}, cores // processes threads each, {layout}"
    return _peer(peer, settings, suffix=suffix_of(layout), arguments=arguments, processes=2, layout=layout)


def _tensorflow(replicas: int) -> Contender:
    how = f"MirroredStrategy on {replicas} logical CPU devices" if replicas > 1 else "one device, no strategy"
    settings = (
        f"{how}, one process, strategy.run in a tf.function, oneDNN on, as many threads as TensorFlow chooses, no XLA, "
        "NHWC, the batches on their devices beforehand"
    )
    variables = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return _peer("tensorflow", settings, replicas=replicas, variables=variables)


def _python(peer: str) -> Path:
    return ENVIRONMENTS / peer / "bin" / "python"
