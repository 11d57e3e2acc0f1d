#!/usr/bin/env bash
# The data that TRL's KTOTrainer trains on depend on per_device_train_batch_size: the mismatched answers of its KL term
# are those of the neighbours within so many rows. So two devices with 4 rows each, or 4 rows accumulated twice, are not
# the training of one device with 8: the same program on more devices has another KL term, whatever sums its gradients.
#
# Seen: trl 1.16.0, transformers 5.23.0, torch 2.13.0, Python 3.11. The script fails if another version behaves in
# another way.
# In Lockstep: distribute(trl.KTOTrainer) shows the Trainer the rows of all replicas while it prepares its data, and has
# the numbers of one device with the whole batch (docs/how-to/trainer.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    trl==1.16.0 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY' 2> err || { cat err; exit 1; }
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

words = ["<pad>", "<eos>", "question", *(f"answer{i}" for i in range(8))]
plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
config = GPT2Config(vocab_size=len(words), n_positions=32, n_embd=8, n_layer=1, n_head=1)
rows = [{"prompt": "question ", "completion": f"answer{i} ", "label": i % 2 == 0} for i in range(8)]


def partners(batch_size: int) -> list[str]:
    """The answer that the KL term pairs with each row's question."""
    args = trl.KTOConfig("out", per_device_train_batch_size=batch_size, bf16=False, use_cpu=True, report_to=[])
    model, reference = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    trainer = trl.KTOTrainer(
        model, reference, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    return [words[ids[0]] for ids in trainer.train_dataset["KL_completion_ids"]]


eight, four = partners(8), partners(4)
print(f"trl {trl.__version__}: batch size 8 -> {eight}")
print(f"trl {trl.__version__}: batch size 4 -> {four}")
assert (eight[0], four[0], four[4]) == ("answer7", "answer3", "answer7"), "TRL behaves in another way"
PY
