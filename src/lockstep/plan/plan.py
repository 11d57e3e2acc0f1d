"""``plan``: the layouts of a model on a cluster, ranked. The one function that people call."""

from __future__ import annotations

from dataclasses import replace

from lockstep.plan.devices import DeviceKind, device_kind
from lockstep.plan.links import LINKS, Network
from lockstep.plan.read import Model, shape_of
from lockstep.plan.search import LOCKSTEP, Choices, Plan, Setting, search
from lockstep.plan.settings import Software, precision_named


def plan(
    model: Model,
    *,
    devices: int,
    kind: str | DeviceKind,
    batch: int,
    network: Network | None = None,
    software: Software | None = None,
    choices: Choices | None = None,
) -> Plan:
    """Ranks the ways of training ``model`` on ``devices`` devices by predicted step time. Pure; no device is touched.

    Args:
        model: see ``shape_of``; another sequence length is ``shape_of(model, sequence=...)``.
        devices: how many there are.
        kind: a name of the table of devices, such as "a100-80gb", or figures of one's own.
        batch: lines in the global batch.
        network: how devices are joined; by default as such devices usually are.
        software: what is assumed of the program; by default Lockstep's own, in the half precision that the device has.
        choices: what is given and what is free; by default all that ``ls.ParallelStrategy`` does so far, and with
            ``Choices()`` all that can be predicted.

    Returns:
        Every layout that fits in memory, the fastest first, and why the others do not.

    Raises:
        ConfigError: no layout divides the model or fits; the message names what would.

    Example:
        >>> plan("gpt2-xl", devices=8, kind="a100-80gb", batch=512).best.layout.call()
        'ls.ParallelStrategy(data=8, pipeline=1, tensor=1)'
    """
    device = device_kind(kind) if isinstance(kind, str) else kind
    setting = Setting(
        shape=shape_of(model),
        devices=devices,
        device=device,
        network=network or usual_network(device, devices),
        batch=batch,
        software=software or usual_software(device),
    )
    return search(setting, choices or LOCKSTEP)


def usual_network(device: DeviceKind, devices: int) -> Network:
    """The links that hosts of such devices usually have."""
    return Network(
        inside=LINKS[device.inside],
        between=LINKS[device.between],
        per_host=min(device.per_host, devices),
    )


def usual_software(device: DeviceKind) -> Software:
    """Lockstep itself, in bf16 where the device has it, else in fp16; a CPU computes in float32."""
    if device.name == "cpu":
        return Software(precision=precision_named("fp32"))
    half = "bf16" if "bf16" in device.peak_tflops else "fp16"
    return replace(Software(), precision=precision_named(half))
