"""Checkpoints of models divided among workers: gone on from on the same layout, on others, and on one device.

    one device, step 4 -> 2 x 2 x 2, step 8 -> 1 x 4 x 1 -> one device        each of them goes on to the end besides

Real processes over gloo; each number of workers is launched once, and all tests are in one tier: the launches take 37 s
of processor time and the tests of what they leave one. The numbers are those of a loop by hand, in float64.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import signal
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lockstep as ls
from lockstep.checkpoint.format import Contents, read_checkpoint
from lockstep.errors import CheckpointError

pytestmark = [pytest.mark.slow, pytest.mark.workers, pytest.mark.usefixtures("one_core")]

PROGRAM = Path(__file__).parent / "programs" / "parallel_checkpoints.py"
LIMIT_S = 250
STEP, LATER = "step-00000004", "step-00000008"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one(program: Any, folder: Path) -> Any:
    """A training on one device, and its checkpoint."""
    found = program.trained("gpt2", str(folder), kept_in="one kept")
    program.pick(SimpleNamespace(workers=ls.get_strategy().workers), str(folder), "one kept", "one")
    return found


@pytest.fixture(scope="module")
def eight(program: Any, folder: Path, one: Any) -> Any:
    """What 2 x 2 x 2 did."""
    return ls.launch(program.eight, workers=8, args=(str(folder),), timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def four(program: Any, folder: Path, eight: Any) -> Any:
    """What 1 x 4 x 1 and 2 x 1 x 2 made of it."""
    return ls.launch(program.four, workers=4, args=(str(folder),), timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def by_hand(program: Any) -> dict[str, torch.Tensor]:
    return program.by_hand("gpt2")


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(other[name], value)]


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert list(found) == list(expected)
    return [name for name, value in expected.items() if not torch.allclose(found[name], value, rtol=1e-10, atol=1e-10)]


def optimizer_state(contents: Contents) -> dict[str, Any]:
    """By the parameters' names."""
    shared = contents.states["optimizer"]["shared"]
    names = [name for group in shared["names"] for name in group]
    return {names[number]: values for number, values in shared["state"]["state"].items()}


def test_resumed_on_the_same_layout_from_before_a_damaged_shard_is_bit_equal_to_undisturbed(eight: Any):
    assert "step-00000008 is damaged (weights/shard-00003" in eight["told"]["of the damage"][0]
    assert differing(eight["again"]["weights"], eight["undisturbed"]["weights"]) == []
    assert eight["again"]["history"] == eight["undisturbed"]["history"]


def test_gone_on_from_another_layout_the_numbers_are_those_of_one_device(eight: Any, four: Any, by_hand: Any):
    assert far(eight["from one"]["weights"], by_hand) == []
    assert far(four["line"]["weights"], by_hand) == []
    assert four["line"]["history"]["loss"] == pytest.approx(eight["from one"]["history"]["loss"], rel=1e-10)


def test_one_device_goes_on_from_a_pipeline(program: Any, folder: Path, four: Any, by_hand: Any):
    found = program.trained("gpt2", str(folder), resumed_from="eight on four")
    assert far(found["weights"], by_hand) == []


@pytest.mark.parametrize(
    ("before", "after", "step", "needs"),
    [
        ("one", "one on eight", STEP, "eight"),
        ("line", "eight on four", LATER, "four"),
        ("line", "four on shares", LATER, "four"),
    ],
)
def test_a_checkpoint_that_another_layout_has_loaded_and_saved_is_the_same(
    request: pytest.FixtureRequest, folder: Path, before: str, after: str, step: str, needs: str
):
    request.getfixturevalue(needs)
    one, other = read_checkpoint(folder / before / step), read_checkpoint(folder / after / step)

    assert differing(one.weights["model"], other.weights["model"]) == []
    states = optimizer_state(one), optimizer_state(other)
    assert states[0].keys() == states[1].keys()
    assert "transformer.h.1.mlp.c_proj.bias" not in states[0]  # frozen
    assert [name for name in states[0] if differing(states[0][name], states[1][name])] == []
    groups = [contents.states["optimizer"]["shared"]["state"]["param_groups"] for contents in (one, other)]
    assert groups[0] == groups[1]
    assert one.states["scheduler"]["shared"] == other.states["scheduler"]["shared"]


def test_a_divided_optimizers_state_moves_between_layouts_too(folder: Path, four: Any):
    one, other = (
        read_checkpoint(folder / "bert on eight" / "step-00000001"),
        read_checkpoint(folder / "bert on four" / "step-00000001"),
    )

    states = optimizer_state(one), optimizer_state(other)
    assert states[0].keys() == states[1].keys()
    assert "cls.predictions.bias" in states[0]  # tied; only one of its names has a state
    assert "cls.predictions.decoder.bias" not in states[0]
    assert [name for name in states[0] if differing(states[0][name], states[1][name])] == []


def test_statistics_go_back_to_each_replica_and_elsewhere_are_their_mean(folder: Path, four: Any):
    statistics = [ast.literal_eval(each) for each in four["norms"]["statistics"]]
    weights = read_checkpoint(folder / "norms" / "step-00000001").weights["model"]
    assert all(before == after for before, after in statistics)
    assert statistics[0] == statistics[1] != statistics[2] == statistics[3]  # tensor ranks are alike
    mean = sum(torch.tensor(statistics[number][0][0], dtype=torch.float64) for number in (0, 2)) / 2
    assert torch.equal(weights["3.running_mean"], mean)
    assert differing(four["norms"]["weights"], weights) == []


def test_bf16_stays_what_it_is(program: Any, folder: Path, four: Any):
    one, other = (read_checkpoint(folder / name / "step-00000001") for name in ("halves", "halves again"))
    model, module = program.own_model(None, torch.nn.Identity(), torch.bfloat16)
    model.load_checkpoint(folder / "halves")

    assert differing(one.weights["model"], other.weights["model"]) == []
    assert differing(one.weights["model"], module.state_dict()) == []
    states = optimizer_state(one), optimizer_state(other)
    assert states[0]["0.weight"]["exp_avg"].dtype == states[1]["0.weight"]["exp_avg"].dtype == torch.bfloat16
    assert [name for name in states[0] if differing(states[0][name], states[1][name])] == []
    assert torch.equal(model.optimizer.state[module[2].weight]["exp_avg_sq"], states[0]["2.weight"]["exp_avg_sq"])


def test_every_worker_writes_files_of_its_own(folder: Path, eight: Any):
    files = {path.name[: len("shard-00001")] for path in (folder / "kept" / STEP / "weights").iterdir()}
    sizes = [path.stat().st_size for path in (folder / "kept" / STEP / "weights").glob("shard-0000[1-8]-*")]
    whole = sum(value.nbytes for value in eight["undisturbed"]["weights"].values())
    assert files >= {f"shard-0000{number}" for number in range(1, 9)}
    assert max(sizes) < whole / 3


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_one_file_is_what_from_pretrained_reads(program: Any, folder: Path, eight: Any, name: str):
    module = program.build(name)
    module.config.save_pretrained(folder / name)
    loaded = type(module).from_pretrained(folder / name, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = loaded(**program.batches()[0][0]).logits
    assert torch.allclose(logits, eight[f"{name} predicted"], rtol=1e-10, atol=1e-10)
    if name == "gpt2":
        assert differing(loaded.state_dict(), eight["from one"]["weights"]) == []


def test_a_checkpoint_exports_the_file_without_the_model(folder: Path, eight: Any):
    ls.export_weights(folder / "bert on eight", folder / "exported.safetensors")
    saved = load_file(folder / "bert" / "model.safetensors")
    assert differing(load_file(folder / "exported.safetensors"), saved) == []


def test_weights_that_were_loaded_are_everyones(eight: Any):
    assert differing(eight["loaded"], eight["from one"]["weights"]) == []


def test_what_cannot_be_is_refused_and_a_worker_killed_in_a_save_leaves_the_one_before(tmp_path: Path, start_job: Any):
    folder = tmp_path / "kept"
    workers = start_job(in_trouble, str(folder), workers=2)
    told = [worker.wait_for("dies now") for worker in workers]

    for text in told:
        unseen, alone, nameless, back, *_, ended = text.strip().split("\n")
        assert re.match(r"CheckpointError: worker 1 .*: does not see the folder /proc/self/cwd/kept, in which", unseen)
        assert re.match(r"ConfigError: Checkpoint\(optimizer=...\) got the optimizer of a model that it did not", alone)
        assert re.match(r"CheckpointError: .*step-00000001 has for 'optimizer' a state without", nameless)
        assert back.startswith("went back to 1: ")
        assert ended == "ended with 75"  # SIGTERM came to worker 1 alone
    assert re.search(r"step-00000003 is damaged \(weights/shard-00002\S*: the checksum of", told[0])
    assert {path.name[:11] for path in (tmp_path / "kept ended").glob("step-*/weights/*")} == {
        "shard-00001",
        "shard-00002",
    }
    assert workers[1].end() == -signal.SIGKILL
    assert workers[0].end() != 0
    assert "worker 1" in workers[0].error
    assert ls.latest_checkpoint(folder) == folder / "step-00000001"
    assert read_checkpoint(folder / "step-00000001").record.layout == "data=1, pipeline=1, tensor=2"
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def in_trouble(folder: str) -> None:
    runpy.run_path(str(PROGRAM), run_name="parallel_checkpoints")["in_trouble"](folder)


def test_a_lost_file_of_a_worker_is_told(folder: Path, eight: Any, tmp_path: Path):
    source, copy = folder / "kept" / STEP, tmp_path / STEP
    copy.mkdir()
    for path in source.rglob("*"):
        target = copy / path.relative_to(source)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    lost = next((copy / "weights").glob("shard-00003-00001*"))
    lost.unlink()

    with pytest.raises(CheckpointError, match=r"damaged \(weights/shard-00003.*No such file"):
        read_checkpoint(copy)
    record = json.loads((copy / "checkpoint.json").read_text())
    del record["files"][f"weights/{lost.name}"], record["checksum"]
    record["checksum"] = zlib.crc32(json.dumps(record).encode())
    (copy / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="lacks a part of"):
        ls.export_weights(copy, tmp_path / "model.safetensors")
