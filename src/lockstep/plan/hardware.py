"""How devices are joined: bandwidth and latency inside a host and between hosts, and what a collective takes on them.

The cost of a collective is the usual one of a ring: each of n devices sends (n-1)/n of the bytes, once for a
reduce-scatter or an all-gather and twice for an all-reduce. A ring over several hosts moves at the pace of its slowest
link, which is the network: as many rails as the ring has devices in a host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lockstep.errors import ConfigError

Format = Literal["fp32", "tf32", "fp16", "bf16"]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """What one device can do, at most.

    Args:
        name: as it is written on the command line.
        memory_gib: memory, in GiB.
        bandwidth_gb_s: memory bandwidth, in GB/s.
        peak_tflops: number format -> peak rate of matrix products, in TFLOP/s.
        inside: name of the link between such devices of one host.
        between: name of the link between hosts, for each device.
        per_host: devices in the usual host.
        source: where the figures are published, or "measured".
    """

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    peak_tflops: Mapping[Format, float] = field(hash=False)
    inside: str
    between: str
    per_host: int
    source: str

    def __post_init__(self) -> None:
        for name in ("memory_gib", "bandwidth_gb_s", "per_host"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} was given, expected more than 0")

    @property
    def memory(self) -> float:
        """In bytes."""
        return self.memory_gib * GIB

    @property
    def bandwidth(self) -> float:
        """In bytes a second."""
        return self.bandwidth_gb_s * 1e9

    def peak(self, format: Format) -> float:
        """The peak rate in FLOP/s.

        Raises:
            ConfigError: the device has no units for that format.
        """
        if format not in self.peak_tflops:
            known = ", ".join(sorted(self.peak_tflops))
            raise ConfigError(f"{self.name} has no published rate in {format}; choose one of {known}")
        return self.peak_tflops[format] * 1e12


_A100 = "NVIDIA A100 Tensor Core GPU datasheet (2021)"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (2023), dense rates"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet (2020), SXM2"
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
_HOPPER = {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}


def _kind(
    name: str, memory: float, bandwidth: float, peaks: Mapping[str, float], links: tuple[str, str], source: str
) -> DeviceKind:
    return DeviceKind(
        name=name,
        memory_gib=memory,
        bandwidth_gb_s=bandwidth,
        peak_tflops=peaks,  # type: ignore[arg-type]
        inside=links[0],
        between=links[1],
        per_host=1 if name == "cpu" else 8,
        source=source,
    )


DEVICE_KINDS: Mapping[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        _kind("a100-40gb", 40, 1555, _AMPERE, ("nvlink3", "hdr"), _A100),
        _kind("a100-80gb", 80, 2039, _AMPERE, ("nvlink3", "hdr"), _A100),
        _kind("h100-sxm", 80, 3350, _HOPPER, ("nvlink4", "ndr"), _H100),
        _kind(
            "h100-pcie",
            80,
            2000,
            {"fp32": 51.0, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0},
            ("pcie5", "hdr"),
            _H100,
        ),
        _kind("h200", 141, 4800, _HOPPER, ("nvlink4", "ndr"), "NVIDIA H200 Tensor Core GPU datasheet (2023), SXM"),
        _kind("v100-16gb", 16, 900, {"fp32": 15.7, "fp16": 125.0}, ("nvlink2", "edr-half"), _V100),
        _kind("v100-32gb", 32, 900, {"fp32": 15.7, "fp16": 125.0}, ("nvlink2", "edr-half"), _V100),
        _kind(
            "rtx-3090",
            24,
            936,
            {"fp32": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0},
            ("pcie4", "ethernet-10"),
            "NVIDIA GA102 GPU architecture whitepaper (2021)",
        ),
        _kind(
            "rtx-4090",
            24,
            1008,
            {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2},
            ("pcie4", "ethernet-10"),
            "NVIDIA Ada GPU architecture whitepaper (2022)",
        ),
        # 40 cores x 2 units of 16 floats x 2 operations x 2.3 GHz; 8 channels of DDR4-3200.
        _kind(
            "cpu",
            256,
            204.8,
            {"fp32": 5.9, "bf16": 5.9},
            ("memory", "ethernet-10"),
            "Intel ARK, Xeon Platinum 8380, one socket; use --measure for another",
        ),
    )
}


def device_kind(name: str) -> DeviceKind:
    """The device called ``name``, in any case.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    kind = DEVICE_KINDS.get(name.lower().replace("_", "-"))
    if kind is None:
        raise ConfigError(f"the device kind {name!r} is not known; choose one of {', '.join(DEVICE_KINDS)}")
    return kind


_OWN = re.compile(r"^(\d+(?:\.\d+)?)(?:@(\d+(?:\.\d+)?))?$")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a link, for one device.

    Args:
        name: as it is written on the command line.
        bandwidth_gb_s: in GB/s, one way.
        latency_us: of one hop, in microseconds.
    """

    name: str
    bandwidth_gb_s: float
    latency_us: float

    def __post_init__(self) -> None:
        if self.bandwidth_gb_s <= 0 or self.latency_us < 0:
            raise ConfigError(
                f"a link of {self.bandwidth_gb_s} GB/s and {self.latency_us} us was given,"
                " expected a bandwidth above 0 and a latency of at least 0; write 25@14"
            )


# Latencies of a hop are those by which NCCL itself chooses algorithms (src/graph/tuning.cc, ring, simple protocol);
# bandwidths are half of the published two-way figures, or the signalling rate of the port over 8.
_NVLINK_US, _PCIE_US, _NET_US, _ETHERNET_US = 3.4, 5.7, 14.0, 50.0
LINKS: Mapping[str, Link] = {
    name: Link(name=name, bandwidth_gb_s=bandwidth, latency_us=latency)
    for name, bandwidth, latency in (
        ("nvlink2", 150.0, _NVLINK_US),
        ("nvlink3", 300.0, _NVLINK_US),
        ("nvlink4", 450.0, _NVLINK_US),
        ("pcie3", 15.75, _PCIE_US),
        ("pcie4", 31.5, _PCIE_US),
        ("pcie5", 63.0, _PCIE_US),
        ("memory", 20.0, _PCIE_US),
        ("edr-half", 6.25, _NET_US),  # DGX-1: four ports of 100 Gb/s for eight devices
        ("edr", 12.5, _NET_US),
        ("hdr", 25.0, _NET_US),
        ("ndr", 50.0, _NET_US),
        ("ethernet-1", 0.125, _ETHERNET_US),
        ("ethernet-10", 1.25, _ETHERNET_US),
        ("ethernet-25", 3.125, _ETHERNET_US),
        ("ethernet-100", 12.5, _ETHERNET_US),
    )
}


def parse_link(text: str) -> Link:
    """``nvlink3``, or a link of one's own: ``25`` GB/s each way, ``25@14`` with 14 microseconds a hop.

    Raises:
        ConfigError: neither a known name nor such numbers.
    """
    own = _OWN.match(text)
    if own:
        return Link(name=text, bandwidth_gb_s=float(own[1]), latency_us=float(own[2] or _NET_US))
    if text.lower() not in LINKS:
        raise ConfigError(
            f"the link {text!r} is not known; choose one of {', '.join(LINKS)}, or write GB/s@microseconds as 25@14"
        )
    return LINKS[text.lower()]


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a cluster of equal hosts.

    Args:
        inside: between the devices of a host.
        between: between hosts, for each device (a host's whole bandwidth over its devices).
        per_host: devices in a host.
    """

    inside: Link
    between: Link
    per_host: int

    def __post_init__(self) -> None:
        if self.per_host < 1:
            raise ConfigError(f"per_host={self.per_host} was given, expected at least 1 device in a host")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Devices that meet in a collective: how many, and how many of them sit in one host.

    Args:
        size: devices in the group.
        local: of them in one host; equal in all hosts.
    """

    size: int
    local: int


def group(size: int, stride: int, per_host: int) -> Group:
    """The group of ``size`` devices whose numbers are ``stride`` apart, numbers running through one host first."""
    return Group(size=size, local=max(1, min(size, per_host // stride)))


def ring_seconds(bytes: float, group: Group, network: Network, share: float, start_s: float) -> float:
    """What one reduce-scatter or all-gather takes; an all-reduce is two.

    Args:
        bytes: of the whole tensor.
        group: who meets.
        network: the links.
        share: part of a link's bandwidth that is reached.
        start_s: what the start of a collective takes, in seconds.
    """
    if group.size == 1:
        return 0.0
    inside, between = network.inside, network.between
    rate = inside.bandwidth_gb_s
    hops = (group.local - 1) * inside.latency_us
    if group.size > group.local:
        rate = min(rate, between.bandwidth_gb_s * group.local) if group.local > 1 else between.bandwidth_gb_s
        # NCCL takes trees where rings get long: the hosts cost their logarithm.
        hops += (group.size // group.local).bit_length() * between.latency_us
    return bytes * (group.size - 1) / group.size / (rate * 1e9 * share) + hops * 1e-6 + start_s


def send_seconds(bytes: float, same_host: bool, network: Network, share: float) -> float:
    """What it takes to send a tensor from one device to another."""
    link = network.inside if same_host else network.between
    return bytes / (link.bandwidth_gb_s * 1e9 * share) + link.latency_us * 1e-6
