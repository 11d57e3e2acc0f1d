"""One training on several hosts, started by SLURM, TF_CONFIG, torchrun or `lockstep run`.

Every worker, a process, runs this file. Two workers on this machine:

    lockstep run --workers 2 examples/09_two_hosts.py

Two hosts, with a worker for each GPU. The first address is that of hosta in both commands:

    lockstep run --hosts hosta:29500,hostb:29500 --index 0 examples/09_two_hosts.py    # on hosta
    lockstep run --hosts hosta:29500,hostb:29500 --index 1 examples/09_two_hosts.py    # on hostb

SLURM, with restarts after failures and requeueing (read the file first), or plainly:

    sbatch examples/slurm/train.sbatch examples/09_two_hosts.py
    srun --nodes=2 --ntasks-per-node=1 python examples/09_two_hosts.py

Without any launcher, in two terminals or on two hosts, with "index" 0 and 1:

    export TF_CONFIG='{"cluster": {"worker": ["localhost:20000", "localhost:20001"]},
                       "task": {"type": "worker", "index": 0}}'
    python examples/09_two_hosts.py

Four replicas on as many workers as there are. Up to three may be lost at any time; the same bits come out at the end:

    lockstep run --workers 1:4 examples/09_two_hosts.py --replicas 4 --epochs 50
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lockstep as ls


def main() -> None:
    """Trains and tests; goes on from the backup if there is one."""
    args = parse_arguments()
    # Waits for all workers and takes their devices together. Started by itself, this is the only worker. The chief's
    # random state is sent to all, so they draw the same weights and shuffle the data alike.
    # `replicas` lays a fixed number of replicas on whatever workers there are.
    threads = 1 if args.replicas else None  # per replica: part of what the bits depend on, so not the cores of a host
    strategy = ls.MultiWorkerMirroredStrategy(args.devices, replicas=args.replicas, threads_per_replica=threads, seed=0)
    torch.manual_seed(0)
    with strategy.scope():
        network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(256, 10))
        model = ls.Model(network)
        model.compile(
            optimizer=torch.optim.Adam(network.parameters(), 1e-3),
            loss=nn.CrossEntropyLoss(),
            metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
        )
    train, test = digits()
    # Every worker makes the same calls, in the same order; the chief alone writes and prints. Do not put `fit`,
    # `evaluate` or `save_weights` under `if chief`: the other workers would not be there. On several hosts the folder
    # must be one that all of them see if workers may change places.
    backup = ls.BackupAndRestore(args.backup, save_freq=args.save_freq)
    model.fit(train, epochs=args.epochs, callbacks=[backup], verbose=2)
    result = model.evaluate(test, verbose=0)  # of the rows of all workers, and equal on all of them
    if strategy.workers.is_chief:
        print(f"workers: {strategy.workers.size}, replicas: {strategy.num_replicas_in_sync}")
        print(f"test: loss {result['loss']:.4f}, accuracy {result['accuracy']:.3f} (chance: 0.100)", flush=True)
    strategy.close()


def digits() -> tuple[DataLoader, DataLoader]:
    """Global batches of scikit-learn's 1,797 images of 8x8 pixels.

    All workers together take a batch of 64 per step: of two, each loads its own 32 rows. Do not divide the data by the
    number of workers, as with a DistributedSampler.
    """
    data = load_digits()
    pixels, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    train, test = TensorDataset(pixels[:1500], labels[:1500]), TensorDataset(pixels[1500:], labels[1500:])
    return DataLoader(train, 64, shuffle=True), DataLoader(test, 256)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    devices = "of each worker, such as gpu:0 or cpu:2; default: its GPUs, or the CPU"
    parser.add_argument("--devices", type=ls.config.request_devices, help=devices)
    parser.add_argument("--replicas", type=int, help="of all workers together; default: one for each device")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--backup", type=Path, default=Path("runs/two-hosts"), help="folder of the backups")
    parser.add_argument("--save-freq", type=int, default=20, help="global batches between backups")
    return parser.parse_args()


if __name__ == "__main__":
    main()
