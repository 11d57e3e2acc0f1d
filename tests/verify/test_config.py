from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep_tools.verify.config import Program, VerifyConfig

HERE = Program(name="here", target=__file__)


def test_a_script_that_is_there_is_taken():
    assert VerifyConfig(program=HERE, devices="cpu:4").steps == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0 was given, expected at least 1"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 was given, expected a number of seconds above 0"),
        ({"devices": "tpu:4"}, "tpu:4"),
        ({"program": Program(name="a", target="no-such.py")}, "the script 'no-such.py' does not exist"),
        ({"program": Program(name="a", target=str(Path(__file__).parent))}, "is a folder, expected a Python file"),
    ],
)
def test_what_cannot_be_used_is_refused(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        VerifyConfig(**{"program": HERE, **settings})
