"""A worker that is killed, stopped, or fails while others wait for it in torch's own collectives: all end, and name it.

These cannot be interrupted: what ends them is that their connections are shut down.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lockstep as ls
from lockstep.membership.failure_report import EXIT_OF_SURVIVOR

pytestmark = pytest.mark.workers

LOST_AFTER_S = 2.0
# Room for a machine that has other things to do.
FOUND_AFTER_S = LOST_AFTER_S + 3.0


# What the workers run.


def fit(index: int, trouble: int, axis: str, kind: str) -> None:
    import transformers

    torch.set_num_threads(1)
    options = ls.CommunicationOptions(lost_after_s=LOST_AFTER_S)
    degrees = {"tensor": 1, "pipeline": 1, axis: 2}
    strategy = ls.ParallelStrategy(**degrees, communication=options, timeout_s=60)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8,
    )  # fmt: skip
    module = transformers.BertForMaskedLM(config)
    steps = count()

    def in_trouble(*_: Any) -> None:
        if index == trouble and next(steps) == 8:
            TROUBLES[kind]()

    module.bert.encoder.layer[0 if axis == "tensor" else index].register_forward_pre_hook(in_trouble)
    with strategy.scope():
        model = ls.Model(strategy.parallelize(module))
        model.compile(lambda p: torch.optim.SGD(p, 0.1), loss)
        words = torch.ones(8, 4, dtype=torch.long)
        model.fit([({"input_ids": words}, words)] * 100, verbose=0)
    strategy.close()


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), reduction="none").reshape(targets.shape)


def wait_for_ever() -> None:
    sys.stdout.write("waits\n")
    sys.stdout.flush()
    threading.Event().wait(60)


def fail() -> None:
    raise ValueError("no such layer")


TROUBLES = {"waits": wait_for_ever, "fails": fail}


# What the tests see of them.


@pytest.mark.parametrize(
    ("axis", "trouble", "number"),
    [("tensor", 0, signal.SIGKILL), ("tensor", 1, signal.SIGSTOP), ("pipeline", 0, signal.SIGSTOP)],
)
def test_a_worker_that_is_lost_in_mid_step_is_named(start_job: Any, axis: str, trouble: int, number: signal.Signals):
    job = start_job(fit, "index", trouble, axis, "waits")
    job[trouble].wait_for("waits")
    since = time.monotonic()
    job[trouble].send(number)
    other = job[1 - trouble]
    assert other.end() == EXIT_OF_SURVIVOR
    assert re.search(rf"ClusterError: worker {trouble} .* is lost: ", other.error), other.errors
    assert other.raised_at - since < FOUND_AFTER_S


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_an_exception_in_a_part_of_the_model_is_the_other_s_error(start_job: Any, axis: str):
    job = start_job(fit, "index", 1, axis, "fails")
    assert [worker.end() for worker in job] == [EXIT_OF_SURVIVOR, 1]
    assert "ValueError: no such layer" in job[1].error
    assert re.search(r"ClusterError: worker 1 .* failed with ValueError: no such layer", job[0].error), job[0].errors
