"""Models made on the meta device whose workers read their parts from files that transformers has written."""

from __future__ import annotations

import ctypes
import gc
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import CheckpointError

pytestmark = [pytest.mark.workers, pytest.mark.slow]

LIMIT_S = 250
MODELS = Path(__file__).parent / "programs" / "small_models.py"
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tensor": ({"data": 1, "tensor": 4}, ("gpt2",)),
    "data and tensor": ({"data": 2, "tensor": 2}, ("bert", "llama", "mixtral")),
    "pipeline": ({"data": 2, "pipeline": 2}, ("gpt2", "llama", "mixtral")),
    "pipeline and tensor": ({"pipeline": 2, "tensor": 2}, ("bert", "gpt2")),
    "sharded weights": ({"data": 2, "tensor": 2, "shard_parameters": True}, ("gpt2",)),
}
EXPERIMENTS = [(name, layout) for layout, (_, names) in LAYOUTS.items() for name in names]
INDEX = "model.safetensors.index.json"
KEPT = [
    ("gpt2", "pipeline"),
    ("mixtral", "data and tensor"),
    ("bert", "pipeline and tensor"),
    ("gpt2", "sharded weights"),
]
LARGE = {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 2048, "vocab_size": 2048}
LARGE_LAYOUTS = {"tensor": {"tensor": 4}, "pipeline": {"pipeline": 4}, "sharded weights": LAYOUTS["sharded weights"][0]}


def models() -> Any:
    return SimpleNamespace(**runpy.run_path(str(MODELS), run_name="small_models"))


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = models().build(name)
    return module


# Faults of the files: each changes a copy of the folder of "gpt2", whose files are several.


def lacks_a_tensor(folder: Path) -> None:
    change(folder, lambda held: held.pop("transformer.h.1.ln_2.bias", None))


def has_an_unknown_one(folder: Path) -> None:
    change(folder, lambda held: held.update(surplus=torch.ones(2)) if "transformer.wpe.weight" in held else None)


def has_another_shape(folder: Path) -> None:
    def cut(held: dict[str, Tensor]) -> None:
        if "transformer.wpe.weight" in held:
            held["transformer.wpe.weight"] = held["transformer.wpe.weight"][:5].clone()

    change(folder, cut)


def has_integers(folder: Path) -> None:
    def quantize(held: dict[str, Tensor]) -> None:
        if "transformer.wpe.weight" in held:
            held["transformer.wpe.weight"] = held["transformer.wpe.weight"].to(torch.int8)

    change(folder, quantize)


def lacks_a_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def has_a_damaged_header(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def is_cut_off(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-8])


def has_a_damaged_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def is_empty(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def change(folder: Path, act: Any) -> None:
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        act(held)
        save_file(held, path, metadata={"format": "pt"})


SECOND = "model-00002-of-"
FAULTS: dict[Any, tuple[str, ...]] = {
    lacks_a_tensor: ("lacks_a_tensor", "transformer.h.1.ln_2.bias"),
    has_an_unknown_one: ("surplus", "model-0000"),
    has_another_shape: ("transformer.wpe.weight", "model-0000", "(5, 16)", "(16, 16)"),
    has_integers: ("transformer.wpe.weight", "model-0000", "int8"),
    lacks_a_file: (INDEX, SECOND),
    has_a_damaged_header: (SECOND,),
    is_cut_off: (SECOND,),
    has_a_damaged_index: (INDEX,),
    is_empty: ("is_empty", "save_pretrained"),
}


# What the workers run.


def read(index: int, folder: str) -> None:
    torch.set_num_threads(1)
    root, found = Path(folder), {}
    for layout, (degrees, names) in LAYOUTS.items():
        strategy = ls.ParallelStrategy(seed=1, **degrees)
        with strategy.scope():
            for name in names:
                mirrored = strategy.parallelize(on_meta(name), weights=root / name)
                model = ls.Model(mirrored)
                found[name, layout] = {key: value.clone() for key, value in model.state_dict().items()}
                if (name, layout) in KEPT:
                    ls.CheckpointManager(ls.Checkpoint(model=mirrored), root / f"{name} of {layout}").save(1)
            if layout == "pipeline and tensor":
                for fault in FAULTS:
                    found[fault.__name__] = refusal(strategy, root / fault.__name__)
        strategy.close()
    for layout, degrees in LARGE_LAYOUTS.items():
        strategy = ls.ParallelStrategy(seed=1, **degrees)
        large = large_on_meta()
        before = memory_reset()
        strategy.parallelize(large, weights=root / "large")
        found["memory", layout] = memory("VmHWM") - before
        strategy.close()
    torch.save(found, root / f"worker-{index}.pt")


def large_on_meta() -> nn.Module:
    import transformers

    with torch.device("meta"):
        module: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE, num_attention_heads=8))
    return module


def memory(kind: str) -> int:
    """Bytes of this process: resident now ("VmRSS"), files that it reads by mapping them included, or at most."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) * 1024


def memory_reset() -> int:
    """Forgets how much memory there was at most; returns how much there is now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def refusal(strategy: ls.ParallelStrategy, folder: Path) -> str:
    try:
        strategy.parallelize(on_meta("gpt2"), weights=folder)
    except CheckpointError as error:
        return str(error)
    return "none"


# What the tests see of them.


@pytest.fixture(scope="module")
def originals() -> dict[str, nn.Module]:
    made, random = {}, torch.Generator().manual_seed(0)
    for name in ("bert", "gpt2", "llama", "mixtral"):
        made[name] = models().build(name)
        with torch.no_grad():  # biases and norms are alike as they are made
            for parameter in made[name].parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pretrained")


@pytest.fixture(scope="module")
def found(start_module_job: Any, folder: Path, originals: dict[str, nn.Module]) -> list[dict[Any, Any]]:
    """What each worker has found."""
    root = folder
    for name, module in originals.items():
        module.save_pretrained(root / name, max_shard_size="20KB")
        assert len(list((root / name).glob("*.safetensors"))) > 2
    large = large_on_meta().to_empty(device="cpu")
    large.save_pretrained(root / "large", max_shard_size="8MB")
    for fault in FAULTS:
        shutil.copytree(root / "gpt2", root / fault.__name__)
        fault(root / fault.__name__)
    job = start_module_job(read, "index", str(root), workers=4)
    assert [worker.end(limit_s=LIMIT_S) for worker in job] == [0] * 4, job[0].errors
    return [torch.load(root / f"worker-{index}.pt", weights_only=False) for index in range(4)]


@pytest.mark.parametrize(("name", "layout"), EXPERIMENTS)
def test_all_weights_are_those_of_the_files(
    found: list[dict[Any, Any]], originals: dict[str, nn.Module], name: str, layout: str
):
    expected = originals[name].state_dict()
    for each in found:
        assert list(each[name, layout]) == list(expected)
        assert [key for key, value in expected.items() if not torch.equal(each[name, layout][key], value)] == []


@pytest.mark.parametrize("layout", LARGE_LAYOUTS)
def test_no_worker_ever_has_all_of_the_weights(found: list[dict[Any, Any]], folder: Path, layout: str):
    whole = sum(file.stat().st_size for file in (folder / "large").glob("*.safetensors"))
    assert whole > 80e6
    assert max(each["memory", layout] for each in found) < 0.65 * whole


@pytest.mark.parametrize(("name", "layout"), KEPT)
def test_the_files_come_back_from_a_checkpoint(
    found: list[dict[Any, Any]], folder: Path, tmp_path: Path, name: str, layout: str
):
    ls.export_weights(folder / f"{name} of {layout}", tmp_path, like=folder / name)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {
        each.name: each.read_bytes() for each in (folder / name).iterdir()
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_files_that_do_not_fit_are_refused_on_every_worker(found: list[dict[Any, Any]], fault: Any):
    for each in found:
        message = each[fault.__name__]
        assert [name for name in FAULTS[fault] if name not in message] == [], message
        assert "\n" not in message
