"""What the pages cluster.md, launch.md and security.md and the examples show is what the code reads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lockstep.cluster.environment import cluster_from_environment
from lockstep_tools.cli.app import parse

ROOT = Path(__file__).parents[2]
CLUSTER, LAUNCH, SECURITY = (
    (ROOT / "docs" / "how-to" / f"{name}.md").read_text() for name in ("cluster", "launch", "security")
)

TF_CONFIGS = [text for text in re.findall(r"TF_CONFIG='(.*?)'", CLUSTER, re.DOTALL) if text != "..."]
COMMANDS = re.findall(r"^lockstep (run .*?)(?:  +#.*)?$", LAUNCH + SECURITY, re.MULTILINE)
BY_HAND = re.findall(r"^(RANK=.*) python train.py", CLUSTER, re.MULTILINE)


def test_the_texts_are_found():
    assert TF_CONFIGS
    assert BY_HAND
    assert COMMANDS


@pytest.mark.parametrize(("text", "place"), list(zip(TF_CONFIGS, ((2, 0), (2, 1), (3, 1)), strict=True)))
def test_every_tf_config_is_read(text: str, place: tuple[int, int]):
    cluster = cluster_from_environment({"TF_CONFIG": text})
    assert (cluster.num_workers, cluster.index) == place


@pytest.mark.parametrize(("words", "index"), list(zip(BY_HAND, (0, 1), strict=True)))
def test_torchruns_variables_by_hand_are_read(words: str, index: int):
    cluster = cluster_from_environment(dict(word.split("=", 1) for word in words.split()))
    assert (cluster.num_workers, cluster.index, cluster.chief_address) == (2, index, ("hosta", 29500))


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_of_the_launcher_is_one(words: str):
    assert callable(parse(shlex.split(words)))  # it can be run, and was not
