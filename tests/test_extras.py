"""An optional package that is missing: one line that names it and the extra."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.errors import MissingExtraError
from lockstep.extras import require


def test_what_is_installed_is_returned():
    assert require("json.decoder", "text") is sys.modules["json.decoder"]


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto"])
def test_a_missing_package_is_named_with_its_extra(module: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "tqdm.auto", raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(MissingExtraError, match=r"^the package 'tqdm' is not installed; .*'torch-lockstep\[x\]'$"):
        require(module, "x")


def test_a_package_that_another_needs_is_named_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "needy.py").write_text("import no_such_package.part")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"^the package 'no_such_package', which needy needs, is not"):
        require("needy", "x")
