"""The Trainer on two workers of two replicas each: one device's numbers, one chief's files, one end."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import FreePorts

transformers = pytest.importorskip("transformers")

import lockstep as ls  # noqa: E402
from lockstep.collectives.communicator import all_gather_object  # noqa: E402
from lockstep.errors import ClusterError  # noqa: E402
from lockstep.membership.failure_report import EXIT_OF_SURVIVOR  # noqa: E402

pytestmark = [pytest.mark.workers, pytest.mark.slow]

PROGRAM = str(Path(__file__).parent / "programs" / "tiny.py")
DYING = str(Path(__file__).parent / "programs" / "dying.py")
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1, "learning_rate": 0.02}


def causal(tiny: Any, **settings: Any) -> Any:
    return tiny.Task(
        model=lambda: tiny.model("CausalLM"),
        train=tiny.rows(21, "tokens"),
        valid=tiny.rows(9, "tokens", seed=2, labelled=True),
        args={"num_train_epochs": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, **settings},
    )


def dropping(tiny: Any) -> Any:
    return tiny.Task(
        model=lambda: tiny.model(dropout=0.3),
        args={**SAVING, "num_train_epochs": 2},
        more={"compute_metrics": tiny.accuracy},
    )


def hungry(tiny: Any, most: int) -> Any:
    """Finds its batch size: memory ends at more than ``most`` rows on a replica."""

    def trainer(base: type) -> type:
        class Hungry(base):
            def compute_loss(self, model, inputs, **named):
                if len(inputs["labels"]) > most:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return super().compute_loss(model, inputs, **named)

        return Hungry

    args = {"auto_find_batch_size": True, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    return tiny.Task(trainer=trainer, args=args, batch=12)


def settle(program: str, replicas: int) -> Any:
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * replicas)
    return SimpleNamespace(**runpy.run_path(program, run_name="tiny"))


class StopsAt(transformers.TrainerCallback):
    """Asks, on one worker, to stop: at the end of an update, or of a batch before it."""

    def __init__(self, event: str, step: int) -> None:
        self.step = step
        setattr(self, event, self.stop)

    def stop(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


def job(program: str, folder: str) -> dict[str, Any]:
    """Everything that a job of two workers does here; what the chief found, and what worker 1 found."""
    tiny = settle(program, 2)
    from lockstep.integrations.transformers import Trainer

    found: dict[str, Any] = {}
    # Made without a strategy: all devices of all workers. Each writes where it alone sees it, as without a shared disk.
    first = tiny.train(causal(tiny, **SAVING, **BEST), Trainer, replicas=4, folder=f"{folder}/own/{os.environ['RANK']}")
    strategy = first.trainer.strategy
    chief = strategy.workers.is_chief
    found["causal"] = (first.history, first.weights)
    found["best"] = Path(first.trainer.state.best_model_checkpoint).name
    found["predicted"] = torch.from_numpy(first.trainer.predict(tiny.rows(7, "tokens", seed=5)).predictions)
    found["world"] = (first.trainer.args.world_size, first.trainer.args.n_gpu, first.trainer.is_world_process_zero())

    whole = tiny.train(dropping(tiny), Trainer, replicas=4, folder=f"{folder}/shared")
    going = dropping(tiny)
    going.resume = f"{folder}/shared/checkpoint-4"
    tiny.assert_same(tiny.train(going, Trainer, replicas=4, folder=f"{folder}/on"), whole, far=0)
    found["dropping"] = (whole.history, whole.weights)

    found["steps"] = []
    for event, step in (("on_step_end", 1), ("on_substep_end", 2)):
        task = causal(tiny)
        task.more = {"callbacks": [] if chief else [StopsAt(event, step)]}
        found["steps"].append(tiny.train(task, Trainer, replicas=4).trainer.state.global_step)

    # Of 12 rows each replica gets 3, of 10 rows those of worker 1 get 2.
    fitting = tiny.train(hungry(tiny, 21 if chief else 2), Trainer, replicas=4)
    found["fitting"] = (fitting.history, fitting.weights)
    found["batch size"] = fitting.trainer.state.train_batch_size

    try:
        tiny.train(causal(tiny, learning_rate=0.1 if chief else 0.2), Trainer, replicas=4)
    except ClusterError as error:
        found["disagreement"] = str(error)
    both = all_gather_object(strategy.workers, "what was found", found)
    strategy.close()
    return {"chief": both[0], "other": both[1]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("job")
    return {"folder": folder, **ls.launch(job, workers=2, args=(PROGRAM, str(folder)), timeout_s=170)}


def test_the_numbers_are_those_of_one_device(results: dict[str, Any], tiny: Any, tmp_path: Path):
    theirs = tiny.train(causal(tiny, **SAVING, **BEST), transformers.Trainer, folder=str(tmp_path))
    for worker in ("chief", "other"):
        ours = tiny.Outcome(*results[worker]["causal"], None)
        tiny.assert_same(ours, theirs, far=1e-5)
        assert results[worker]["best"] == Path(theirs.trainer.state.best_model_checkpoint).name
        expected = torch.from_numpy(theirs.trainer.predict(tiny.rows(7, "tokens", seed=5)).predictions)
        torch.testing.assert_close(results[worker]["predicted"], expected, rtol=1e-4, atol=1e-5)


def test_both_workers_have_the_same_bits(results: dict[str, Any], tiny: Any):
    for run in ("causal", "dropping"):
        chief, other = (tiny.Outcome(*results[worker][run], None) for worker in ("chief", "other"))
        torch.testing.assert_close(other.weights, chief.weights, rtol=0, atol=0)
        assert [log.get("eval_loss") for log in other.history] == [log.get("eval_loss") for log in chief.history]


def test_the_chief_alone_writes_and_logs(results: dict[str, Any]):
    assert [path.name for path in (results["folder"] / "own").iterdir()] == ["0"]
    assert (results["folder"] / "shared" / "checkpoint-6" / "lockstep_rng_state.pth").exists()
    assert results["chief"]["world"] == (1, 4, True)
    assert results["other"]["world"] == (1, 4, False)


def test_one_worker_that_stops_ends_all_alike(results: dict[str, Any]):
    assert results["chief"]["steps"] == results["other"]["steps"] == [1, 2]


def test_a_batch_that_does_not_fit_one_worker_is_reduced_on_all(results: dict[str, Any], tiny: Any):
    theirs = tiny.train(hungry(tiny, 10), transformers.Trainer)
    assert theirs.trainer.state.train_batch_size == 10
    for worker in ("chief", "other"):
        assert results[worker]["batch size"] == 10
        tiny.assert_same(tiny.Outcome(*results[worker]["fitting"], None), theirs, far=1e-5)


def test_different_arguments_are_named(results: dict[str, Any]):
    for worker in ("chief", "other"):
        assert "the workers disagree about the training arguments" in results[worker]["disagreement"]
        assert "learning_rate=0.1, worker 1" in results[worker]["disagreement"]


def test_a_worker_that_dies_ends_the_others_with_its_name(
    python: Callable[..., subprocess.Popen[str]], free_ports: FreePorts
):
    """Started by hand with TF_CONFIG, so that no launcher ends the chief."""
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(2)]}
    started = [
        python(DYING, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}))
        for index in range(2)
    ]

    _, said = started[0].communicate(timeout=120)

    assert started[1].wait(timeout=60) == 3
    assert started[0].returncode == EXIT_OF_SURVIVOR
    assert said.strip().splitlines()[-1].startswith("lockstep.errors.ClusterError: worker 1 (localhost:")
