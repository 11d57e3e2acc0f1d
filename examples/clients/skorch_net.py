"""skorch on all replicas of one process: a net whose batches are divided. Its optimizer and callbacks stay.

python examples/clients/skorch_net.py
"""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from skorch.callbacks import EpochScoring, GradientNormClipping
from skorch.dataset import unpack_data
from torch import nn

import lockstep as ls

BATCH = 64  # images per step, over all replicas


class ReplicaNet(NeuralNetClassifier):
    """A classifier whose batches are divided among the replicas of ``strategy``."""

    def __init__(self, *args: Any, strategy: Any = None, **named: Any) -> None:
        self.strategy = strategy
        super().__init__(*args, **named)

    def train_step_single(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """Runs forward and backward on the shards."""
        self._set_training(True)
        module = self.strategy.mirror(self.module_)  # the same one each time

        def step(x: Any, y: Any) -> Any:
            outputs = module(x)
            loss = ls.compute_average_loss(self.get_loss(outputs, y, X=x, training=True))
            loss.backward()
            return outputs.detach(), loss.detach()

        for shards in self.strategy.distribute_dataset([unpack_data(batch)]):
            outputs, losses = self.strategy.run(step, shards)
        loss = self.strategy.reduce("sum", losses)
        return {"loss": loss, "y_pred": self.strategy.gather(outputs, axis=0)}


def net(kind: type[NeuralNetClassifier], **named: Any) -> Any:
    """A classifier of digits, with callbacks of skorch."""
    torch.manual_seed(0)
    return kind(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.1,
        batch_size=BATCH,
        max_epochs=2,
        train_split=None,
        callbacks=[GradientNormClipping(1.0), EpochScoring("accuracy", on_train=True, name="right")],
        verbose=0,
        **named,
    )


def main(replicas: int) -> None:
    """Trains for two epochs."""
    digits = load_digits()
    pixels, labels = digits.data.astype("float32") / 16, digits.target
    strategy = ls.MirroredStrategy(replicas=replicas)
    classifier = net(ReplicaNet, strategy=strategy, criterion__reduction="none")
    classifier.fit(pixels[:1500], labels[:1500])
    line = classifier.history[-1]
    print(f"loss {line['train_loss']:.4f}, accuracy {classifier.score(pixels[1500:], labels[1500:]):.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
