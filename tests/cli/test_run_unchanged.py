"""Programs that know nothing of Lockstep, under ``lockstep run``: they see an ordinary process group, and end well.

Those of ``examples/unchanged`` train to the numbers of one process on the whole batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from tests import oracle
from tests.cli.conftest import Run
from torch import Tensor, nn

pytestmark = [pytest.mark.workers, pytest.mark.slow]

Order = Callable[[int], Tensor]

EXAMPLES = Path(__file__).parents[2] / "examples" / "unchanged"
PICTURES, BATCH = 1797, 64


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


def as_they_are(epoch: int) -> Tensor:
    return torch.arange(PICTURES)


def shuffled_by_torch_s_sampler(epoch: int) -> Tensor:
    """As ``DistributedSampler`` does with seed 0, which Lightning puts in the place of any other sampler."""
    return torch.randperm(PICTURES, generator=torch.Generator().manual_seed(epoch))


def trained_by_hand(order: Order) -> list[Tensor]:
    """The weights after the same training in one process, on whole batches."""
    data = load_digits()
    pixels, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    rows = [part for epoch in range(2) for part in order(epoch)[: PICTURES // BATCH * BATCH].split(BATCH)]
    batches = [(pixels[part], labels[part]) for part in rows]
    oracle.train(module, batches, lambda parameters: torch.optim.SGD(parameters, 0.5))
    return [parameter.detach() for parameter in module.parameters()]


def saved(folder: Path) -> list[Tensor]:
    if (folder / "model.ckpt").exists():
        values = torch.load(folder / "model.ckpt", weights_only=True)["state_dict"]
    else:
        values = load_file(folder / "model.safetensors")
    names = [f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    return [values.get(name, values.get(f"layers.{name}")) for name in names]


@pytest.mark.parametrize(
    ("script", "order"),
    [
        pytest.param("trainer.py", as_they_are, marks=needs("transformers", "accelerate")),
        pytest.param("accelerate_loop.py", as_they_are, marks=needs("accelerate")),
        pytest.param("lightning_fit.py", shuffled_by_torch_s_sampler, marks=needs("lightning")),
    ],
)
def test_two_processes_train_as_one_on_the_whole_batch(run_lockstep: Run, tmp_path: Path, script: str, order: Order):
    words = ("run", "--workers", "2", "--output", "all", str(EXAMPLES / script), "trained")
    done = run_lockstep(*words, forks_workers=True)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^\[(\d)\] process (\d) of (\d): the weights add up to (\S+)$", done.stdout, re.MULTILINE)
    assert sorted(words[:3] for words in said) == [("0", "0", "2"), ("1", "1", "2")]
    assert said[0][3] == said[1][3]
    for theirs, ours in zip(saved(tmp_path / "trained"), trained_by_hand(order), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


BREAKS = """
import os, runpy, sys, torch
def breaks(*args, **kwargs): raise ValueError("no such picture")
if os.environ["RANK"] == "1": torch.optim.SGD.step = breaks
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "script",
    [  # plain loops are in test_run.py; Accelerate's is one
        pytest.param("trainer.py", marks=needs("transformers", "accelerate")),
        pytest.param("lightning_fit.py", marks=needs("lightning")),
    ],
)
def test_the_traceback_of_the_process_that_failed_is_shown(run_lockstep: Run, tmp_path: Path, script: str):
    (tmp_path / "breaks.py").write_text(BREAKS)

    done = run_lockstep("run", "--workers", "2", "breaks.py", str(EXAMPLES / script), "trained", forks_workers=True)

    assert done.returncode == 1
    told = done.stderr[done.stderr.index("lockstep: the last output of worker 1:\n") :].splitlines()
    assert told[1] == "Traceback (most recent call last):"
    assert any(str(EXAMPLES / script) in line for line in told)
    assert told[-2] == "ValueError: no such picture"
    assert told[-1].startswith("lockstep: error: worker 1 of 2 failed with the ValueError above; its log is ")
    assert "worker 0" not in "\n".join(told)


BEGINS = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
ENDS = """
end = dist.destroy_process_group
dist.destroy_process_group = lambda: (end(), print("parted", flush=True))
"""


def test_groups_that_a_program_left_to_its_end_are_parted_from(run_lockstep: Run, tmp_path: Path):
    """Else a thread of gloo aborts the process now and then."""
    (tmp_path / "ends.py").write_text(BEGINS + ENDS)
    done = run_lockstep("run", "--workers", "2", "--output", "all", "--quiet", "ends.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] parted", "[1] parted"])


def test_a_program_that_failed_does_not_wait_for_what_the_others_never_join(run_lockstep: Run, tmp_path: Path):
    alone = "if os.environ['RANK'] == '0': signal.pause()\ndist.all_reduce(torch.ones(1), async_op=True)\n"
    (tmp_path / "fails.py").write_text(f"{BEGINS}{alone}raise ValueError('no such file')")
    done = run_lockstep("run", "--workers", "2", "--quiet", "fails.py")
    assert done.returncode == 1
    assert "worker 1 of 2 failed with the ValueError above; its log is " in done.stderr
