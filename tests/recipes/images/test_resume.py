"""What a run of the recipe goes on from: a backup of the same pictures, wherever they lie, and of no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from tests.conftest import MakeStrategy
from tests.recipes.images.conftest import MakeConfig, MakeTree

import lockstep as ls
from lockstep.errors import CheckpointError
from lockstep_tools.recipes.images.dataset import load_images
from lockstep_tools.recipes.images.train import run_settings, train_images

pytestmark = pytest.mark.slow


@pytest.fixture
def pictures(make_tree: MakeTree) -> Path:
    """Two classes: 8 pictures to train on, 2 to validate, 2 to test."""
    return make_tree("pictures", {"train/cat": 5, "train/dog": 5, "test/cat": 1, "test/dog": 1})


def test_a_backup_of_other_settings_or_pictures_is_refused(
    pictures: Path, tiny: MakeConfig, make_strategy: MakeStrategy, tmp_path: Path
):
    strategy, kept = make_strategy(1), ls.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    train_images(tiny(data=pictures), strategy, callbacks=[kept], verbose=0)
    Image.new("RGB", (10, 12), (1, 2, 3)).save(pictures / "train" / "dog" / "000.png")
    other = r"of a run with epochs=1, images='\w{16}', and this run has epochs=2, images='\w{16}'; resume with"
    with pytest.raises(CheckpointError, match=other):
        train_images(tiny(data=pictures, epochs=2), strategy, callbacks=[kept], verbose=0)


def test_the_same_pictures_may_lie_elsewhere_and_be_decoded_otherwise(pictures: Path, tiny: MakeConfig, tmp_path: Path):
    here = tiny(data=pictures)
    before = run_settings(here, load_images(here))
    elsewhere = pictures.rename(tmp_path / "elsewhere")
    Image.new("RGB", (10, 12)).save(elsewhere / "test" / "cat" / "001.png")  # no run has learnt from the test
    there = tiny(data=elsewhere, workers=1, patience=1)
    after = run_settings(there, load_images(there))
    assert after == before
    assert not {"data", "workers", "patience"} & after.keys()


def test_other_labels_are_other_pictures(pictures: Path, tiny: MakeConfig):
    config = tiny(data=pictures, valid_fraction=0.0)
    before = run_settings(config, load_images(config))["images"]
    # The last cat is now the first dog: the same pixels in the same order.
    (pictures / "train" / "cat" / "004.png").rename(pictures / "train" / "dog" / "!.png")
    assert run_settings(config, load_images(config))["images"] != before
