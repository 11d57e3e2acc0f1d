#!/usr/bin/env bash
# DataCollatorWithPadding writes into its tokenizer at each batch: it sets tokenizer.deprecation_warnings for the time of
# the padding, and sets it back. After the first batch the dict has a key that it had not before. What follows the state
# of data from batch to batch, as a resume in an epoch needs it, takes that for state; and two threads that pad with one
# tokenizer write to one dict.
#
# Seen: transformers 5.23.0, Python 3.11. The script fails if another version behaves in another way.
# In Lockstep: that attribute is left out of the position in the data (tests/data/test_attribute_state.py); before, each
# checkpoint of the Trainer within an epoch warned of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0
"$folder/venv/bin/python" - <<'PY'
import transformers
from tokenizers import Tokenizer, models

words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
collate = transformers.DataCollatorWithPadding(tokenizer, return_tensors="np")
before = dict(tokenizer.deprecation_warnings)
collate([{"input_ids": [1]}, {"input_ids": [1, 1]}])
after = dict(tokenizer.deprecation_warnings)
print(f"transformers {transformers.__version__}: deprecation_warnings is {before} before a batch and {after} after it")
assert before == {} and after == {"Asking-to-pad-a-fast-tokenizer": False}, "transformers behaves in another way now"
PY
