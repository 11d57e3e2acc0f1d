"""Plans of models, made without a process group: what each worker holds, and that a refused model stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lockstep.errors import ConfigError
from lockstep.parallel.mesh_layout import MeshLayout
from lockstep.parallel.model_plan import ModelPlan, PlanSettings, plan_model
from lockstep.parallel.pipeline_config import ScheduleName, choose_pipeline_config
from lockstep.parallel.tensor_styles import LocalLinear


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden).relu())


def blocks(count: int = 4) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(count)))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=8))


def tied() -> nn.Module:
    net = blocks()
    net[1].up.weight = net[2].up.weight  # of two stages in the middle
    return net


def numbered() -> nn.Module:
    net = blocks()
    net.scale = nn.Parameter(torch.ones(()))
    return net


def plan_of(
    module: nn.Module,
    worker: int = 0,
    *,
    schedule: ScheduleName = "1f1b",
    tensors: Any = "auto",
    split: Any = "auto",
    shard_parameters: bool = False,
    sequence_parallel: bool = False,
    **degrees: int,
) -> ModelPlan:
    layout = MeshLayout(**degrees)
    settings = PlanSettings(
        layout=layout,
        pipelining=choose_pipeline_config(schedule, None, layout.pipeline),
        shard_parameters=shard_parameters,
        sequence_parallel=sequence_parallel,
    )
    return plan_model(module, settings, layout.coordinate(worker), tensors, split)


def state_of(module: nn.Module) -> list[Any]:
    """All that building a part changes: tensors and their numbers, modules, forwards, hooks and numbers of modules."""
    state: list[Any] = [
        (name, id(tensor), tensor._version) for name, tensor in module.state_dict(keep_vars=True).items()
    ]
    for name, part in module.named_modules():
        plain = {key: value for key, value in vars(part).items() if isinstance(value, int | str | bool)}
        hooks = [len(part._forward_pre_hooks), len(part._forward_hooks)]
        state.append((name, id(part), type(part), "forward" in vars(part), plain, hooks))
    return state


def test_stages_and_styles_are_names_of_modules_and_each_weight_has_its_workers():
    styles = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    plans = [plan_of(blocks(), worker, tensors=styles, pipeline=2, tensor=2) for worker in range(4)]

    assert not dist.is_initialized()
    for worker, plan in enumerate(plans):
        assert plan.stages == (("0", "1"), ("2", "3"))
        assert plan.numbers == (worker // 2,)
        assert {name.partition(".")[0] for name in plan.weights} == set(plan.stages[worker // 2])
        assert set(plan.tensors.styles) == {f"{block}.{name}" for block in range(4) for name in ("up", "down")}
        assert isinstance(plan.tensors.styles["3.up"], LocalLinear)  # in place of torch's, for the same layouts
        assert plan.names == tuple(blocks().state_dict())
        assert plan.deferred == 0


def test_the_plan_of_a_model_of_transformers_has_its_ties_and_the_order_of_its_columns():
    first, last = (plan_of(gpt2(), worker, pipeline=2, tensor=2) for worker in (0, 2))

    assert first.stages == (
        ("transformer.h.0", "transformer.wte", "transformer.wpe", "transformer.drop"),
        ("transformer.h.1", "transformer.ln_f", "lm_head"),
    )
    assert first.ties == (("transformer.wte.weight", "lm_head.weight"),)
    assert (first.tied, last.tied) == (("transformer.wte.weight",), ("lm_head.weight",))
    assert "transformer.wpe.weight" in first.weights - last.weights
    assert first.tensors.orders["transformer.h.1.attn.c_attn.weight"].columns[:8].tolist() == [*range(4), *range(8, 12)]
    assert first.tensors.scaled == {f"transformer.h.{layer}.attn": "split_size" for layer in range(2)}


def test_layers_that_divide_sequences_are_those_of_a_stage():
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=16, max_position_embeddings=8,
        )
    )  # fmt: skip
    plan = plan_of(llama, pipeline=2, tensor=2, schedule="zero_bubble_v", sequence_parallel=True)

    assert [plan.layers_of(stage) for stage in plan.numbers] == [["model.layers.0"], ["model.layers.3"]]


def test_tensors_on_the_meta_device_are_deferred():
    with torch.device("meta"):
        assert plan_of(blocks(), pipeline=2).deferred == 16


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        (blocks, {"pipeline": 2, "split": "half"}, "pipeline_split='half' is unknown"),
        (blocks, {"pipeline": 2, "split": ["9"]}, "has no such module"),
        (blocks, {"pipeline": 2, "split": [1, 1]}, "does not divide 4 layers"),
        (tied, {"pipeline": 4}, r"workers \[1, 2\] of a pipeline"),
        (blocks, {"tensor": 2}, "needs a model of transformers"),
        (blocks, {"tensor": 2, "tensors": {"*.side": ColwiseParallel()}}, "has no such module"),
        (blocks, {"tensor": 3, "tensors": {"*.down": RowwiseParallel()}}, "tensor=3 does not divide the in_features"),
        (blocks, {"tensor": 2, "tensors": {}, "sequence_parallel": True}, 'goes with tensor_plan="auto"'),
        (gpt2, {"tensor": 3, "pipeline": 2}, "tensor=3 does not divide"),
        (gpt2, {"tensor": 2, "pipeline": 4}, "4 stages, and the model has 2 layers"),
        (numbered, {"data": 2, "shard_parameters": True}, "scale is a single number, which cannot be sharded"),
    ],
)
def test_a_refused_model_is_unchanged(build: Callable[[], nn.Module], settings: dict[str, Any], words: str):
    module = build()
    before = state_of(module)

    with pytest.raises(ConfigError, match=words):
        plan_of(module, **settings)

    assert state_of(module) == before
