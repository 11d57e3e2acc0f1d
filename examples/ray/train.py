"""Trains on the workers of Ray Train, and goes on from the last reported checkpoint when Ray restarts them.

    pip install 'torch-lockstep[ray]' scikit-learn
    python examples/ray/train.py --workers 2 --storage /mnt/results

Several hosts need a storage that all of them see. The loss and the weights are those of one device.
"""

import argparse
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls


def train(config: dict) -> None:
    """What every worker of Ray runs. Batches are global ones: of 64 rows each of two workers gets 32."""
    data = load_digits()
    pixels, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    train_data = TensorDataset(pixels[:1500], labels[:1500])
    # Ray says in variables which worker this is, and its process group passes on the address where they meet.
    strategy = ls.MultiWorkerMirroredStrategy(seed=0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    with strategy.scope():
        model = ls.Model(network)
        model.compile(torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9), loss=nn.CrossEntropyLoss())
    model.fit(
        DataLoader(train_data, batch_size=64, shuffle=True),
        validation_data=DataLoader(TensorDataset(pixels[1500:], labels[1500:]), batch_size=256),
        epochs=config["epochs"],
        verbose=0,
        callbacks=[ls.RayTrain()],
    )
    strategy.close()


def main() -> None:
    """Starts the training, with up to three restarts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--storage", type=Path, default=Path("ray-results"))
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(storage_path=str(args.storage.absolute()), failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    print(f"validation: loss {result.metrics['val_loss']:.4f}; checkpoint: {result.checkpoint.path}")
    ray.shutdown()


if __name__ == "__main__":
    main()
