"""A worker of a job that TF_CONFIG declares, trained with a Trainer; worker 1 dies in its second update."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

import lockstep as ls
from lockstep.integrations.transformers import Trainer

torch.set_num_threads(1)
tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "tiny.py"), run_name="tiny"))
strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"])


class Dies(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and not strategy.workers.is_chief:
            os._exit(3)


with strategy.scope():
    tiny.train(tiny.Task(more={"callbacks": [Dies()]}), Trainer, replicas=2)
