"""Published figures of devices: memory, peak rates, memory bandwidth. A table; each row names its source.

Peak rates are dense ones (no sparsity), with accumulation in float32 where the source tells it apart, as PyTorch does.
"""

from __future__ import annotations

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
