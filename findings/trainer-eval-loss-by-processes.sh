#!/usr/bin/env bash
# The eval_loss of the Transformers Trainer depends on the number of processes where the rows cannot be shared evenly. The
# last batches are filled with the first rows again, each batch's mean stands for all of its rows, the repeated ones
# too, and of this list the first as many are averaged as there are rows.
#
# Seen: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0, Python 3.11: for 5 rows with losses 1, 1, 4, 4 and 100, two
# rows of each process in a batch, eval_loss is 22.0 on one process (the mean) and 12.1 on two. The script fails if
# another version behaves in another way.
# In Lockstep: 22.0 on any number of replicas (tests/docs/test_measured_there_and_here.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.0 transformers==5.23.0 accelerate==1.15.0
cat > "$folder/program.py" <<'PY'
import torch
import transformers


class Squares(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, labels):
        outputs = x * self.weight
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}


rows = [{"x": torch.tensor([x]), "labels": torch.zeros(1)} for x in (1.0, 1.0, 2.0, 2.0, 10.0)]
arguments = transformers.TrainingArguments(
    "output", per_device_eval_batch_size=2, use_cpu=True, report_to="none", remove_unused_columns=False, disable_tqdm=True
)
loss = transformers.Trainer(Squares(), arguments, eval_dataset=rows).evaluate()["eval_loss"]
if arguments.process_index == 0:
    print(f"transformers {transformers.__version__}, {arguments.world_size} process(es): eval_loss {loss:.1f}")
    assert round(loss, 4) == {1: 22.0, 2: 12.1}[arguments.world_size], "the Trainer behaves in another way now"
PY
cd "$folder"
venv/bin/python program.py | grep eval_loss
venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 program.py | grep eval_loss
