"""Flags made from a dataclass: names, types, defaults and help."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from lockstep.errors import ConfigError
from lockstep_tools.cli.flags import NO_FLAG, Nested, command, field_docs, flags_of


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


@dataclass(frozen=True, kw_only=True)
class Job:
    """Does something with the settings.

    Only once.

    Args:
        quiet: whether to say nothing.
        name: who does it.
    """

    quiet: bool = False
    name: Annotated[str, typer.Option("-n", metavar="WHO")] = "me"
    auto: Annotated[bool, NO_FLAG] = False
    config: Settings


def build(**nested: object) -> typer.Typer:
    app = typer.Typer()
    app.command()(command(Job, config=Nested(kind=Settings, **nested)))
    return app


def call(*words: str, **nested: object) -> Job:
    job = get_command(build(**nested)).main(list(words), standalone_mode=False)
    assert isinstance(job, Job)
    return job


def test_without_flags_the_config_is_the_default_one():
    assert call() == Job(config=Settings())


def test_the_help_is_what_stands_before_the_arguments():
    shown = " ".join(CliRunner().invoke(build(), ["--help"]).output.split())
    assert "Does something with the settings. Only once." in shown
    assert "Args" not in shown
    assert "--auto" not in shown
    assert "Who does it." in shown
    assert "-n WHO" in shown


def test_a_field_without_a_flag_has_its_default_or_what_is_given():
    job = call(without=("rate",), constants={"shuffle": False}, defaults={"batch_size": 3})
    assert job.config == Settings(batch_size=3, shuffle=False)
    for flag in ("--rate", "--shuffle"):
        with pytest.raises(typer.TyperException, match="No such option"):
            call(flag, without=("rate",), constants={"shuffle": False})


def test_every_field_is_a_flag_of_its_type():
    words = ["--batch-size", "8", "--rate", "0.5", "--text", "a/b", "--precision", "bf16", "--no-shuffle", "--quiet"]
    expected = Settings(batch_size=8, rate=0.5, text=Path("a/b"), precision="bf16", shuffle=False)
    assert call(*words) == Job(config=expected, quiet=True)


def test_a_number_may_be_auto():
    assert call("--batch-size", "auto", auto="batch_size") == Job(config=Settings(), auto=True)
    assert call("--batch-size", "8", auto="batch_size") == Job(config=Settings(batch_size=8))
    assert call(auto="batch_size") == Job(config=Settings())
    with pytest.raises(ConfigError, match="--batch-size many was given, expected an integer or auto"):
        call("--batch-size", "many", auto="batch_size")
    assert "NUMBER|auto" in CliRunner().invoke(build(auto="batch_size"), ["--help"]).output


def test_the_help_of_a_flag_is_the_entry_of_the_docstring():
    assert field_docs(Settings) == {
        "batch_size": "examples in a global batch, of all replicas.",
        "rate": "the rate at the start.",
        "text": "a folder of text files; None takes the embedded text.",
        "precision": "what is computed in.",
        "shuffle": "whether to shuffle.",
    }


def test_the_help_reaches_the_flag():
    (parameter,) = [p for p in flags_of(Settings) if p.name == "rate"]
    assert get_args(parameter.annotation)[1].help == "The rate at the start."
    assert parameter.default == 1e-4
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_a_value_that_the_config_rejects_is_the_config_s_own_error():
    with pytest.raises(ConfigError, match="batch_size=0 is no size"):
        call("--batch-size", "0")
