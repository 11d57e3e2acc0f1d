"""Writes docs/reference/models.md: ``python docs/_scripts/divided_models.py``.

Trains a tiny model of each type of transformers that has plans, or for which Lockstep has them, on one device, on
``tensor=2`` and on ``pipeline=2``, in float64, and compares the losses and all weights after an update. A job goes from
type to type; one that fails is noted, and another job goes on after it.
"""

from __future__ import annotations

import gc
import json
import re
import runpy
import sys
import tempfile
import warnings
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import ConfigError, LockstepError
from lockstep.parallel.transformers_plans import MODEL_SPECS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
in_double = runpy.run_path(str(ROOT / "tests" / "strategies" / "programs" / "model_types.py"))[
    "in_double"
]

GRIDS: dict[str, dict[str, int]] = {"tensor=2": {"tensor": 2}, "pipeline=2": {"pipeline": 2}}
SAME = 1e-9
ROWS, TOKENS, WORDS, LABELS = 4, 6, 67, 5
JOB_S = 900.0
MOST = 2_000_000  # weights
LONGEST = 200  # characters of a reason

SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "head_dim": 8, "max_position_embeddings": 32, "sliding_window": 3, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": LABELS,
    "image_size": 8, "patch_size": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "n_group": 2, "topk_group": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "shared_intermediate_size": 12,
    "expert_ffn_hidden_size": 12, "ffn_hidden_size": 24, "ffn_dim": 24, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_num_heads": 4,
    "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 4, "mamba_chunk_size": 4,
    "lru_width": 16, "block_dim": 16, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": WORDS,
    "query_pre_attn_scalar": 4,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0, "embedding_dropout": 0.0,
    "activation_dropout": 0.0, "layerdrop": 0.0, "residual_dropout": 0.0, "ffn_dropout": 0.0,
}  # fmt: skip
"""Of a configuration, those that its type has."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dots1": {
        "num_key_value_heads": 2,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "esmc": {"num_key_value_heads": 4, "head_dim": 4},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4v_moe_text": {
        "rope_parameters": {**ROPE, "mrope_section": [1, 0, 0], "partial_rotary_factor": 0.5}
    },
    "glm4v_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}},
    "glm5_next_text": {"index_topk": 16},
    "glm_image_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}},
    "glm_ocr_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}},
    "helium": {"head_dim": 4},
    "hunyuan_v1_moe": {"head_dim": 8},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "num_hidden_layers": 4,
        "num_layers": 2,
        "qk_head_dim": 8,
        "head_dim": 4,
        "zero_expert_num": 2,
    },
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": {**ROPE, "partial_rotary_factor": 0.5},
        }
    },
    "qwen2_5_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}},
    "qwen2_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}},
}
"""And those that a type must be given."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one update gave."""

    loss: float
    weights: dict[str, Tensor]


def types() -> list[str]:
    """The types of models that have plans and a class of their own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    plans = ("base_model_tp_plan", "base_model_pp_plan")
    return sorted(
        kind
        for kind, config in CONFIG_MAPPING.items()
        if (kind in MODEL_SPECS or any(getattr(config, plan, None) for plan in plans))
        and class_of(kind) is not None
    )


def class_of(kind: str) -> Any:
    """The class that is trained: with a head for words or images, if there is one."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]
    mappings = (
        transformers.MODEL_FOR_MASKED_LM_MAPPING if kind in MODEL_SPECS and kind != "gpt2" else {},
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_MASKED_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        transformers.MODEL_MAPPING,
    )
    for mapping in mappings:
        try:
            found = mapping.get(config, None)
        except ValueError:  # a name in the mapping that transformers does not export
            continue
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    return None


def build(kind: str) -> nn.Module:
    """A tiny model, whose weights are away from ones and zeros."""
    cls = class_of(kind)
    known = cls.config_class()
    sizes = {name: value for name, value in SIZES.items() if has(known, name)}
    if "kv_lora_rank" in sizes:  # heads have keys and values of their own, and sizes of their own
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    rope = dict(getattr(known, "rope_parameters", None) or {})
    if "mrope_section" in rope:
        half = int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
        sizes["rope_parameters"] = {**rope, "mrope_section": [half - half // 2, half // 2, 0]}
    sizes |= MORE.get(kind, {})
    config = cls.config_class(**sizes, experts_implementation="eager", attn_implementation="eager")
    with torch.device("meta"):
        numbers = sum(each.numel() for each in cls(config).parameters())
    if numbers > MOST:
        raise ValueError(f"{numbers} weights, which SIZES does not make fewer")
    torch.manual_seed(1)
    module: nn.Module = cls(config).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.train()


def has(config: Any, name: str) -> bool:
    """Whether a configuration has one size of this name for all layers."""
    try:
        return getattr(config, name, None) is not None
    except (ValueError, RuntimeError):  # sizes of each layer
        return False


def batch(module: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    random = torch.Generator().manual_seed(0)
    if getattr(module, "main_input_name", "") == "pixel_values":
        images = torch.randn(ROWS, 3, 8, 8, generator=random, dtype=torch.float64)
        return {"pixel_values": images}, torch.randint(LABELS, (ROWS,), generator=random)
    words, targets = torch.randint(3, WORDS, (2, ROWS, TOKENS), generator=random)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}, targets


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """A cross-entropy of each word or image; of a model without a head, a mean of squares."""
    logits = outputs.get("logits")
    if logits is None:
        return outputs["last_hidden_state"].square().mean((-2, -1))
    logits = logits if targets.ndim == 1 else logits.transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.3)


def alone(kind: str) -> Trained:
    """An update by hand."""
    module = build(kind)
    x, y = batch(module)
    made = optimizer(module.parameters())
    values = loss(module(**x), y)
    values.mean().backward()
    made.step()
    return Trained(loss=values.mean().item(), weights=module.state_dict())


def divided(kind: str, strategy: ls.ParallelStrategy) -> Trained | str:
    """An update on a strategy, or why it does not divide the model."""
    module = build(kind)
    data = [batch(module)]
    try:
        model = ls.Model(strategy.parallelize(module))
    except ConfigError as error:  # on all workers
        return str(error)
    model.compile(optimizer, loss)
    history = model.fit(data, verbose=0)
    return Trained(loss=history.history["loss"][0], weights=model.state_dict())


def difference(found: Trained, expected: Trained) -> float:
    far = [abs(found.loss - expected.loss)]
    far += [
        float((found.weights[name] - whole).abs().max())
        for name, whole in expected.weights.items()
    ]
    return max(far)


def run(kinds: list[str], grid: dict[str, int], results: str) -> None:
    """Appends a line for each type: how far it is from one device, or why it cannot be divided."""
    torch.set_num_threads(1)
    quiet()
    with closing(ls.ParallelStrategy(seed=7, **grid)) as strategy, strategy.scope(), in_double():
        for kind in kinds:
            found = divided(kind, strategy)
            if strategy.workers.is_chief:
                note = found if isinstance(found, str) else difference(found, alone(kind))
                with Path(results).open("a") as file:
                    file.write(json.dumps([kind, note]) + "\n")
            del found
            gc.collect()


def run_all(kinds: list[str], grid: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while left := [kind for kind in kinds if kind not in found]:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results")
            results.touch()
            error = ""
            try:
                ls.launch(run, workers=2, args=(left, grid, str(results)), timeout_s=JOB_S)
            except LockstepError as failed:
                error = f"{type(failed.__cause__ or failed).__name__}: {failed.__cause__ or failed}".partition(
                    "\n"
                )[0]
            found |= dict(json.loads(line) for line in results.read_text().splitlines())
        done = [kind for kind in left if kind in found]
        if error and len(done) < len(left):
            found[left[len(done)]] = error
            say(f"{grid}: {left[len(done)]}: {error}")
        say(f"{grid}: {len(found)} of {len(kinds)}")
    return found


def one_device(kinds: list[str]) -> dict[str, str]:
    """Why a type has no tiny model here, for those that do not; nothing for the others."""
    found = {}
    with in_double():
        for kind in kinds:
            try:
                found[kind] = (
                    "" if torch.tensor(alone(kind).loss).isfinite() else "its loss is not finite"
                )
            except Exception as error:  # noqa: BLE001  whatever a type wants that SIZES does not have
                found[kind] = f"{type(error).__name__}: {error}".partition("\n")[0]
                say(f"one device: {kind}: {found[kind]}")
    return found


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


INTRODUCTION = """
[`ParallelStrategy`](../how-to/parallel.md) divides a model of transformers by the model's own plans. This page lists
every type that has a plan for tensors or for stages, and those for which Lockstep has them. It is written by
`python docs/_scripts/divided_models.py`, here with transformers {transformers} and torch {torch}.

A tiny model of each type made one update in float64 on one device, on `tensor=2` and on `pipeline=2`. **yes** means
that the loss and all weights differed from those of one device by {same} at most. That was so for
{counts}.
"""


def page(without: dict[str, str], found: dict[str, dict[str, Any]]) -> str:
    """The page, of what ``one_device`` and ``run_all`` found."""
    import transformers

    kinds = sorted(kind for kind, why in without.items() if not why)
    counts = [
        f"{sum(map(works, results.values()))} of {len(kinds)} types on `{name}`"
        for name, results in found.items()
    ]
    introduction = INTRODUCTION.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        same=f"{SAME:.0e}",
        counts=" and ".join(counts),
    )
    faults = [
        f"- `{kind}`, `{name}`: {reason(results[kind])}"
        for kind in kinds
        for name, results in found.items()
        if not works(results[kind])
    ]
    lines = [
        "# Models of transformers that can be divided",
        introduction,
        "| type | class | " + " | ".join(f"`{name}`" for name in found) + " |",
        "| --- | --- |" + " --- |" * len(found),
        *(f"| `{kind}` | `{class_of(kind).__name__}` |{cells(kind, found)}" for kind in kinds),
        "\n## What does not work\n",
        *faults,
        "\n## What was not tried\n\nThe script has no tiny model of these types:\n",
        *(f"- `{kind}`: {reason(why)}" for kind, why in sorted(without.items()) if why),
    ]
    return "\n".join(lines) + "\n"


def cells(kind: str, found: dict[str, dict[str, Any]]) -> str:
    return "".join(
        f" {'yes' if works(results[kind]) else '**no**'} |" for results in found.values()
    )


def works(result: Any) -> bool:
    return isinstance(result, float) and result <= SAME


def reason(result: Any) -> str:
    if isinstance(result, float):
        return f"differs by {result:.1e}"
    text = re.sub(r" \(127\.0\.0\.1:\d+\)", "", str(result)).replace("`", "")
    return f"`{text if len(text) <= LONGEST else text[:LONGEST] + '...'}`"


def main() -> None:
    quiet()
    torch.set_num_threads(1)
    kinds = types()
    without = one_device(kinds)
    tried = [kind for kind in kinds if not without[kind]]
    PAGE.write_text(page(without, {name: run_all(tried, grid) for name, grid in GRIDS.items()}))


if __name__ == "__main__":
    main()
