"""Versions, and which extras are installed. Reads the metadata of packages and imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lockstep import __version__
from lockstep_tools.doctor.section import Fact, Section, Trouble

DISTRIBUTION = "torch-lockstep"
EXTRAS: Mapping[str, str] = {
    "train": "metrics, progress bars, TensorBoard, weights in safetensors",
    "plots": "curves, and the pages of lockstep bench",
    "transformers": "the Transformers Trainer",
    "keras": "Keras models",
    "lightning": "Lightning's Trainer",
    "ray": "Ray Train",
    "text": "lockstep train mlm and reviews, LoRA",
    "images": "lockstep train images",
    "loggers": "Weights & Biases, MLflow, trackio",
    "quantized": "8-bit and 4-bit weights, on a GPU",
}
"""Name of an extra -> what it is for."""
# Name, extras, lowest version and the extra that asks for it, of the form that a built wheel has; ``packaging`` would
# be a dependency for one line.
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,.-]+)\])?[^;]*?(?:>=([\d.]+))?[^;]*(?:;.*extra == \"([\w-]+)\")?")

FindVersion = Callable[[str], str | None]


def examine_software() -> Section:
    """The probe."""
    facts = [
        Fact("lockstep", __version__),
        Fact("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        Fact("torch", installed_version("torch") or "not installed"),
        Fact("system", _system()),
    ]
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # run from its source
        facts.append(Fact("extras", "not known, since the package runs from its source and is not installed"))
        return Section(title="versions", facts=facts, troubles=_troubles(installed_version))
    for extra, purpose in EXTRAS.items():
        missing = missing_packages(extra, requirements, installed_version)
        state = f"lacks {', '.join(missing)}" if missing else "installed"
        facts.append(Fact(f"extra {extra}", f"{state}; for {purpose}"))
    return Section(title="versions", facts=facts, troubles=_troubles(installed_version))


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages(extra: str, requirements: Sequence[str], find: FindVersion) -> list[str]:
    """What of an extra is not installed, or too old. Pure.

    Args:
        extra: its name.
        requirements: the package's requirements, as its metadata have them.
        find: returns the version of a package.
    """
    missing = {}
    for name, least in _needs(extra, requirements):
        version = find(name)
        if version is None:
            missing[name] = name
        elif least and _numbers(version) < _numbers(least):
            missing[name] = f"{name} {least} (has {version})"
    return sorted(missing.values())


def _needs(extra: str, requirements: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each package of an extra, and of the extras that it names, with its lowest version."""
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None or match[4] != extra:
            continue
        if match[1] == DISTRIBUTION:
            for part in match[2].split(","):
                yield from _needs(part, requirements)
        else:
            yield match[1], match[3] or ""


def _numbers(version: str) -> list[int]:
    # Without the local part, such as the "+cpu" of torch's versions.
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _troubles(find: FindVersion) -> list[Trouble]:
    # Another project on PyPI has the import name as its own name.
    if find("lockstep") is None:
        return []
    return [
        Trouble(
            "The package `lockstep` is installed, which is another project: its files may stand in for ours. Run: pip"
            " uninstall lockstep, and then pip install --force-reinstall --no-deps torch-lockstep."
        )
    ]


def _system() -> str:
    container = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    libc = " ".join(filter(None, platform.libc_ver()))
    return f"{platform.system()} {platform.release()} {platform.machine()}, {libc}{', in a container' * container}"
