from __future__ import annotations

import json
import os
import runpy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recipes.images.conftest import MakeConfig, MakeTree

import lockstep as ls
from lockstep.errors import DataError
from lockstep_tools.recipes.images import dataset
from lockstep_tools.recipes.images.dataset import load_images


def break_pictures(folder: Path, number: int) -> None:
    for path in sorted(folder.iterdir())[:number]:
        path.write_bytes(b"")


def test_pixels_and_labels_of_each_part_belong_together(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"train/a": 10, "train/b": 10, "test/b": 3})
    pictures = load_images(tiny(data=root))
    assert pictures.classes == ("a", "b")
    assert [len(pictures.splits[part].pixels) for part in ("train", "valid", "test")] == [18, 2, 3]
    assert pictures.splits["test"].labels == (1, 1, 1)
    assert pictures.splits["test"].pixels[:, 0, 0, 1].tolist() == [0, 7, 14]


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_gives_the_same_pixels_in_order(workers: int, make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 40, "b": 40})
    break_pictures(root / "a", 1)
    with pytest.warns(UserWarning, match="they are skipped"):
        alone, together = (load_images(tiny(data=root, workers=number)) for number in (0, workers))
    for part in ("train", "valid", "test"):
        assert alone.splits[part].labels == together.splits[part].labels
        assert torch.equal(alone.splits[part].pixels, together.splits[part].pixels)


def test_what_does_not_fit_into_memory_is_refused(
    make_tree: MakeTree, tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dataset, "available_mb", lambda: 10.0)
    with pytest.raises(DataError, match=r"80 images of 224x224 .*11 MB.*10 MB"):
        load_images(tiny(data=make_tree("data", {"a": 40, "b": 40}), size=224))


def test_a_few_broken_pictures_are_skipped_and_leave_the_others_where_they_are(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 60, "b": 60})
    before = load_images(tiny(data=root)).splits
    break_pictures(root / "b", 5)

    with pytest.warns(UserWarning, match=r"5 of 120 images cannot be read, such as '.*b/00[0-4].png' \(the file"):
        pictures = load_images(tiny(data=root))

    assert sorted(path.name for path in pictures.broken) == [f"{n:03}.png" for n in range(5)]
    for part, images in pictures.splits.items():
        rows = {tuple(row.flatten().tolist()) for row in before[part].pixels}
        assert all(tuple(row.flatten().tolist()) in rows for row in images.pixels)
    assert sum(len(images.labels) for images in pictures.splits.values()) == 115


def load_on_worker(damaged: tuple[Path, Path], refused: Mapping[str, tuple[Path, Path]]) -> tuple[Any, ...]:
    """In each worker: the images of its host, as all workers have agreed on them; then images that are refused."""
    from contextlib import closing

    import lockstep as ls
    from lockstep_tools.recipes.images.config import ImagesConfig

    errors: dict[str, str] = {}
    with closing(ls.MultiWorkerMirroredStrategy(["cpu:0"])) as strategy:
        workers = strategy.workers
        config = ImagesConfig(data=damaged[workers.index], size=8, output_stride=8, workers=0)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            images = load_images(config, workers=workers)
        texts = json.dumps([str(warning.message) for warning in warned]).encode()
        warnings_of_all = [json.loads(text) for text in workers.all_gather_bytes("warnings", texts)]
        pixels = b"".join(part.pixels.numpy().tobytes() for part in images.splits.values())
        everyone = workers.all_gather_bytes("the pixels", pixels)
        for name, folders in refused.items():
            skipped_file = folders[0].with_name(f"skipped-{workers.index}.txt")
            with pytest.raises(DataError) as caught:
                load_images(replace(config, data=folders[workers.index]), workers=workers, skipped_file=skipped_file)
            errors[name] = str(caught.value)
        errors_of_all = [json.loads(text) for text in workers.all_gather_bytes("errors", json.dumps(errors).encode())]
    return images.broken, everyone, warnings_of_all, errors_of_all


def _called(path: str, *args: Any) -> Any:
    """Runs ``load_on_worker`` of this file, which no worker could import by name."""
    return runpy.run_path(path, run_name="source")["load_on_worker"](*args)


@pytest.mark.workers
def test_workers_agree_on_the_broken_images_and_refuse_different_ones_or_many(make_tree: MakeTree, tmp_path: Path):
    here, there = (make_tree(name, {"a": 30, "b": 30}) for name in ("here", "there"))
    other, damaged = make_tree("other", {"a": 30, "b": 29}), make_tree("damaged", {"a": 30, "b": 30})
    break_pictures(here / "a", 1)
    (there / "b" / "005.png").write_bytes(b"")
    break_pictures(damaged / "b", 3)

    job, refused = partial(_called, str(Path(__file__))), {"other": (here, other), "many": (here, damaged)}
    broken, pixels, warned, errors = ls.launch(job, workers=2, args=((here, there), refused), timeout_s=100)

    assert [path.name for path in broken] == ["000.png", "005.png"]
    assert ["; on worker 1" in reason for reason in broken.values()] == [False, True]
    ((warning,), of_worker_1) = warned
    assert of_worker_1 == []  # once, and not once a worker
    assert warning.startswith("2 of 60 images cannot be read, such as ")
    assert len(set(pixels)) == 1
    assert len(pixels[0]) == 58 * 8 * 8 * 3
    for error in errors:
        assert error["other"].startswith("worker 1")
        assert "(59 and 60); expected the same files" in error["other"]
        assert error["many"].startswith("4 of 60 images cannot be read")
    lines = sorted((tmp_path / "skipped-0.txt").read_text().splitlines())
    names = ["a/000.png", "b/000.png", "b/001.png", "b/002.png"]
    assert [line.removeprefix(f"{here}/").partition("\t")[0] for line in lines] == names
    assert ["the file is empty; on worker 1" in line for line in lines] == [False, True, True, True]
    assert not (tmp_path / "skipped-1.txt").exists()


def test_more_broken_pictures_than_the_share_are_an_error_that_lists_all(
    make_tree: MakeTree, tiny: MakeConfig, tmp_path: Path
):
    root, listed = make_tree("data", {"a": 12, "b": 12}), tmp_path / "out" / "skipped.txt"
    empty, foreign, link = root / "a" / "000.png", root / "b" / os.fsdecode(b"\xff.png"), root / "b" / "link.png"
    empty.write_bytes(b"")
    foreign.write_bytes(b"no picture")
    link.symlink_to("nowhere.png")

    first = r"3 of 26 images cannot be read, such as '.*a/000.png' \(the file is empty\)"
    advice = f"these are 11.5%, expected at most 5%; repair or remove those that '{listed}' lists"
    with pytest.raises(DataError, match=f"{first}; {advice}"):
        load_images(tiny(data=root), skipped_file=listed)

    reasons = dict(line.split(b"\t") for line in listed.read_bytes().splitlines())
    assert reasons[bytes(empty)] == b"the file is empty"
    assert reasons[bytes(foreign)].startswith(b"cannot identify")
    assert reasons[bytes(link)].startswith(b"[Errno 2]")
    assert len(reasons) == 3


def test_a_class_of_broken_pictures_is_an_error(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 3, "b": 90})
    break_pictures(root / "a", 3)
    with (
        pytest.raises(DataError, match="no readable training image is left of the class 'a', expected at least one"),
        pytest.warns(UserWarning, match="3 of 93"),
    ):
        load_images(tiny(data=root))


def test_a_test_part_of_nothing_is_an_error(make_tree: MakeTree, tiny: MakeConfig):
    with pytest.raises(DataError, match="no image is left for the test"):
        load_images(tiny(data=make_tree("data", {"a": 1, "b": 1})))


def test_a_share_without_effect_warns(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"train/a": 5, "train/b": 5, "test/b": 3})
    with pytest.warns(UserWarning, match="test_fraction=0.3 has no effect: the images have a test split"):
        load_images(tiny(data=root, test_fraction=0.3))


def test_images_without_a_class_and_classes_without_a_test_image_are_told(make_tree: MakeTree, tiny: MakeConfig):
    root = make_tree("data", {"a": 10, "b": 10, "rare": 1})
    (root / "a" / "000.png").rename(root / "loose.png")
    (root / ".hidden.png").write_bytes(b"")
    images = load_images(tiny(data=root))
    assert images.only_trained == ("rare",)
    assert images.loose == 1
    assert (load_images(tiny()).only_trained, load_images(tiny()).loose) == ((), 0)
