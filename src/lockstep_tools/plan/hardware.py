"""Published figures of devices and links, and the time of a collective on them.

Peak rates are dense (no sparsity), with accumulation in float32 where the source distinguishes it, as in PyTorch.
A ring of n devices moves (n-1)/n of the bytes, once for a reduce-scatter or an all-gather and twice for an all-reduce.
A ring over several hosts runs at the speed of the network, over as many rails as the ring has devices in a host.
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
    """The figures of one device."""

    name: str  # name on the command line
    memory_gib: float  # memory in GiB
    bandwidth_gb_s: float  # memory bandwidth in GB/s
    peak_tflops: Mapping[Format, float] = field(hash=False)  # peak rate of matrix products in TFLOP/s, by number format
    inside: str  # name of the link between such devices in one host
    between: str  # name of each device's link to other hosts
    per_host: int = 8  # devices in a usual host
    # Fractions of the peak rate that are reached. In large products: 250 of 312 TFLOP/s on an A100. Moving the operands
    # is counted separately, so small and narrow products come out slower.
    matmul: float = 0.80
    # in fused attention: FlashAttention-2 reaches 50% to 73% on an A100 (arXiv 2307.08691)
    attention: float = 0.62
    source: str  # where the figures are published

    @property
    def memory(self) -> float:
        """Memory in bytes."""
        return self.memory_gib * GIB

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth in bytes per second."""
        return self.bandwidth_gb_s * 1e9

    def peak(self, format: Format) -> float:
        """Peak rate in FLOP/s; raises ConfigError if the device has none for that format."""
        if format not in self.peak_tflops:
            formats = ", ".join(sorted(self.peak_tflops))
            raise ConfigError(f"{self.name} has no published rate in {format}; choose one of {formats}")
        return self.peak_tflops[format] * 1e12


def _peaks(fp32: float, half: float, tf32: float) -> Mapping[Format, float]:
    return {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half}


_H100 = "NVIDIA H100 Tensor Core GPU datasheet (2023), dense rates"
_VOLTA: Mapping[Format, float] = {"fp32": 15.7, "fp16": 125.0}
_AMPERE, _HOPPER = _peaks(19.5, 312.0, tf32=156.0), _peaks(67.0, 989.4, tf32=494.7)
_DEVICES: tuple[tuple[str, float, float, Mapping[Format, float], str, str, str], ...] = (
    ("a100-40gb", 40, 1555, _AMPERE, "nvlink3", "hdr", "NVIDIA A100 Tensor Core GPU datasheet (2021)"),
    ("a100-80gb", 80, 2039, _AMPERE, "nvlink3", "hdr", "NVIDIA A100 Tensor Core GPU datasheet (2021)"),
    ("h100-sxm", 80, 3350, _HOPPER, "nvlink4", "ndr", _H100),
    ("h100-pcie", 80, 2000, _peaks(51.0, 756.0, tf32=378.0), "pcie5", "hdr", _H100),
    ("h200", 141, 4800, _HOPPER, "nvlink4", "ndr", "NVIDIA H200 Tensor Core GPU datasheet (2023), SXM"),
    ("v100-16gb", 16, 900, _VOLTA, "nvlink2", "edr-half", "NVIDIA V100 Tensor Core GPU datasheet (2020), SXM2"),
    ("v100-32gb", 32, 900, _VOLTA, "nvlink2", "edr-half", "NVIDIA V100 Tensor Core GPU datasheet (2020), SXM2"),
    ("rtx-3090", 24, 936, _peaks(35.6, 71.0, tf32=35.6), "pcie4", "ethernet-10", "NVIDIA GA102 whitepaper (2021)"),
    ("rtx-4090", 24, 1008, _peaks(82.6, 165.2, tf32=82.6), "pcie4", "ethernet-10", "NVIDIA Ada whitepaper (2022)"),
)
_CPU = DeviceKind(
    name="cpu",
    memory_gib=256,
    bandwidth_gb_s=204.8,
    # 40 cores x 2 units of 16 floats x 2 operations x 2.3 GHz; 8 channels of DDR4-3200.
    peak_tflops={"fp32": 5.9, "bf16": 5.9},
    inside="memory",
    between="ethernet-10",
    per_host=1,
    source="Intel ARK, Xeon Platinum 8380, one socket",
)
# They reach smaller fractions. Products: fitted to MosaicML's published runs on one host of H100, in
# tests/plan/test_validation.py. Attention: FlashAttention-2 (arXiv 2407.08608).
_HOPPERS = ("h100-sxm", "h100-pcie", "h200")
DEVICE_KINDS: Mapping[str, DeviceKind] = {
    name: DeviceKind(
        name=name,
        memory_gib=memory,
        bandwidth_gb_s=bandwidth,
        peak_tflops=peaks,
        inside=inside,
        between=between,
        source=source,
        matmul=0.65 if name in _HOPPERS else 0.80,
        attention=0.35 if name in _HOPPERS else 0.62,
    )
    for name, memory, bandwidth, peaks, inside, between, source in _DEVICES
} | {"cpu": _CPU}


def device_kind(text: str) -> DeviceKind:
    """A known device, in any case, or one by its figures: GiB, GB/s and half-precision TFLOP/s, such as ``48,864,362``.

    Raises:
        ConfigError: the name is unknown.
    """
    numbers = re.fullmatch(r"(\d+(?:\.\d+)?),(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)", text)
    if numbers and all(map(float, numbers.groups())):
        memory, bandwidth, peak = map(float, numbers.groups())
        return DeviceKind(
            name=text,
            memory_gib=memory,
            bandwidth_gb_s=bandwidth,
            peak_tflops={"bf16": peak, "fp16": peak},
            inside="pcie4",
            between="ethernet-10",
            source="given",
        )
    kind = DEVICE_KINDS.get(text.lower().replace("_", "-"))
    if kind is None:
        names = ", ".join(DEVICE_KINDS)
        raise ConfigError(f"the device kind {text!r} is not known; choose one of {names}, or write GiB,GB/s,TFLOP/s")
    return kind


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of one device's link."""

    name: str  # name on the command line
    bandwidth_gb_s: float  # one-way bandwidth in GB/s
    latency_us: float  # latency of a hop in microseconds

    def __post_init__(self) -> None:
        if self.bandwidth_gb_s <= 0:
            raise ConfigError(
                f"a link of {self.bandwidth_gb_s} GB/s was given, expected a bandwidth above 0; write 25@14"
            )


# Latencies are those by which NCCL chooses its algorithms (src/graph/tuning.cc, ring, simple protocol). Bandwidths are
# half of the published two-way figures, or the signalling rate of the port over 8.
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
    """Parses a known name such as ``nvlink3``, or one-way GB/s and microseconds per hop, ``25`` or ``25@14``."""
    numbers = re.fullmatch(r"(\d+(?:\.\d+)?)(?:@(\d+(?:\.\d+)?))?", text)
    if numbers:
        return Link(name=text, bandwidth_gb_s=float(numbers[1]), latency_us=float(numbers[2] or _NET_US))
    if text.lower() not in LINKS:
        raise ConfigError(
            f"the link {text!r} is not known; choose one of {', '.join(LINKS)}, or write GB/s@microseconds as 25@14"
        )
    return LINKS[text.lower()]


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a cluster of equal hosts."""

    inside: Link  # the link between the devices of a host
    between: Link  # each device's link to other hosts: the host's bandwidth divided by its devices
    per_host: int  # devices in a host


def ring_seconds(bytes: float, size: int, stride: int, network: Network, efficiency: float, start_s: float) -> float:
    """The time of one reduce-scatter or all-gather of a tensor of ``bytes``; an all-reduce takes twice as long.

    The ranks of the ``size`` devices are ``stride`` apart and fill one host after another. ``efficiency`` of a link's
    bandwidth is reached, and a collective takes ``start_s`` to start.
    """
    if size == 1:
        return 0.0
    inside, between = network.inside, network.between
    local = max(1, min(size, network.per_host // stride))  # devices in each host
    rate = inside.bandwidth_gb_s
    hops = (local - 1) * inside.latency_us
    if size > local:
        rate = min(rate, between.bandwidth_gb_s * local) if local > 1 else between.bandwidth_gb_s
        # NCCL uses trees where rings get long, so latency grows with the logarithm of the number of hosts.
        hops += (size // local).bit_length() * between.latency_us
    return bytes * (size - 1) / size / (rate * 1e9 * efficiency) + hops * 1e-6 + start_s


def send_seconds(bytes: float, same_host: bool, network: Network, efficiency: float) -> float:
    """The time to send a tensor from one device to another."""
    link = network.inside if same_host else network.between
    return bytes / (link.bandwidth_gb_s * 1e9 * efficiency) + link.latency_us * 1e-6
