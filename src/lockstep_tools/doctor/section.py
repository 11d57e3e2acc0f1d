"""A section of the examination: facts and troubles. What is private is left out of the block for reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep import console


@dataclass(frozen=True)
class Fact:
    """A name and its value; ``private`` ones name hosts or addresses. A report has the value up to its semicolon."""

    name: str
    value: str
    private: bool = False


@dataclass(frozen=True)
class Trouble:
    """What is likely to go wrong, and what to do. ``public`` is its text for a report, if ``text`` is private."""

    text: str
    public: str | None = None


@dataclass(frozen=True, kw_only=True)
class Section:
    """What one probe has found out."""

    title: str
    facts: Sequence[Fact] = field(default_factory=tuple)
    troubles: Sequence[Trouble] = field(default_factory=tuple)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Section:
        """The section that ``to_json`` made the text of."""
        saved: dict[str, Any] = json.loads(text)
        return cls(
            title=saved["title"],
            facts=tuple(Fact(**fact) for fact in saved["facts"]),
            troubles=tuple(Trouble(**trouble) for trouble in saved["troubles"]),
        )


def as_text(sections: Sequence[Section]) -> str:
    """All facts in columns, then the troubles."""
    width = max(len(fact.name) for section in sections for fact in section.facts)
    blocks = [
        "\n".join([console.bold(section.title), *(f"  {fact.name:{width}}  {fact.value}" for fact in section.facts)])
        for section in sections
    ]
    troubles = [trouble.text for section in sections for trouble in section.troubles]
    lines = "\n".join(f"  - {text}" for text in troubles) or "  none of the known ones"
    return "\n\n".join([*blocks, f"{console.bold('troubles')}\n{lines}"])


def as_report(sections: Sequence[Section]) -> str:
    """One block of Markdown for a report: a line for each section, without anything private."""
    lines = []
    for section in sections:
        facts = "; ".join(f"{fact.name} {fact.value.partition(';')[0]}" for fact in section.facts if not fact.private)
        lines.append(f"{section.title}: {facts}")
    troubles = [trouble.public or trouble.text for section in sections for trouble in section.troubles]
    return "\n".join(["```text", *lines, *(f"trouble: {text}" for text in troubles), "```"])
