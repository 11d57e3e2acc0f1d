"""Flags made from a dataclass: names, types, defaults and help."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import pytest
import typer
from typer.testing import CliRunner

from lockstep.cli.flags import config_command, config_parameters, field_docs
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A recipe's settings.

    Args:
        batch_size: examples in a global batch,
            of all replicas.
        rate: the rate at the start.
        text: a folder of text files; None takes the embedded text.
        precision: what is computed in.
        shuffle: whether to shuffle.

    Example:
        not_a_field: this is not help
    """

    batch_size: int = 128
    rate: float = field(default=1e-4)
    text: Path | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} is no size; give 1 or more")


def build(seen: list[object]) -> typer.Typer:
    def command(*, config: Settings, quiet: bool = False) -> None:
        seen.append((config, quiet))

    app = typer.Typer()
    app.command()(config_command(Settings)(command))
    return app


def call(*words: str) -> object:
    seen: list[object] = []
    result = CliRunner().invoke(build(seen), list(words))
    assert result.exit_code == 0, result.output
    return seen[0]


def test_without_flags_the_config_is_the_default_one():
    assert call() == (Settings(), False)


def test_every_field_is_a_flag_of_its_type():
    words = ["--batch-size", "8", "--rate", "0.5", "--text", "a/b", "--precision", "bf16", "--no-shuffle", "--quiet"]

    expected = Settings(batch_size=8, rate=0.5, text=Path("a/b"), precision="bf16", shuffle=False)
    assert call(*words) == (expected, True)


def test_the_help_of_a_flag_is_the_entry_of_the_docstring():
    assert field_docs(Settings) == {
        "batch_size": "examples in a global batch, of all replicas.",
        "rate": "the rate at the start.",
        "text": "a folder of text files; None takes the embedded text.",
        "precision": "what is computed in.",
        "shuffle": "whether to shuffle.",
    }


def test_the_help_reaches_the_flag():
    (parameter,) = [p for p in config_parameters(Settings) if p.name == "rate"]

    assert get_args(parameter.annotation)[1].help == "The rate at the start."
    assert parameter.default == 1e-4
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_a_value_that_the_config_rejects_is_the_config_s_own_error():
    with pytest.raises(ConfigError, match="batch_size=0 is no size"):
        CliRunner().invoke(build([]), ["--batch-size", "0"], catch_exceptions=False)
