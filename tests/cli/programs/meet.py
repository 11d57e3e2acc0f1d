"""A worker's beginning: it meets the others; ``rank`` is then the sum of their numbers."""

import atexit
import os
import sys  # noqa: F401  what is put behind this reads it

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
atexit.register(dist.destroy_process_group)  # or gloo's threads may abort the end of the interpreter
rank = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(rank)
