"""A model, a tokenizer and texts for the programs beside, so that nothing is downloaded. Put yours in their place."""

import random
import sys
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import lockstep as ls

WORDS = (
    *("the", "a", "cat", "dog", "bird", "fish", "sat", "ran", "flew", "slept", "ate", "saw", "on", "under"),
    *("over", "mat", "house", "tree", "seed"),
)


def strategy() -> ls.MirroredStrategy:
    """On the devices that the command line names, else on two of the CPU; on GPUs leave strategy= out."""
    return ls.MirroredStrategy(ls.config.request_devices(sys.argv[1] if len(sys.argv) > 1 else "cpu:2"))


def settings(on: ls.MirroredStrategy) -> dict[str, Any]:
    """Arguments of all programs: 12 examples in a batch, whatever the number of replicas."""
    return {
        "output_dir": "trained",
        "per_device_train_batch_size": 12 // on.num_replicas_in_sync,
        "per_device_eval_batch_size": 12 // on.num_replicas_in_sync,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def texts(number: int, seed: int = 0) -> list[str]:
    """Texts of 3 to 8 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 8))) for _ in range(number)]


def tokenizer() -> Any:
    """One token a word."""
    plain = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]", "bos_token": "[BOS]"}
    plain.train_from_iterator(WORDS, trainers.WordLevelTrainer(special_tokens=[*special.values()]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def llama(kind: Any = transformers.LlamaForCausalLM, **more: Any) -> Any:
    """A Llama of 5,000 weights, the same every time."""
    transformers.set_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 3}
    return kind(transformers.LlamaConfig(**sizes, **heads, **special, **more))


def report(trainer: Any) -> None:
    """Prints the loss of the training and the numbers of an evaluation, without its times. Ends the strategy."""
    print(f"loss {trainer.state.log_history[-1]['train_loss']:.5f}")
    for name, value in trainer.evaluate().items():
        if not name.endswith(("runtime", "per_second", "preparation_time", "epoch")):
            print(f"{name} {value:.4f}")
    trainer.strategy.close()
