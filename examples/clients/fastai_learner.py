"""fastai on all replicas of one process: a Learner whose batches are divided. Its optimizer and callbacks stay.

python examples/clients/fastai_learner.py
"""

import sys
from typing import Any

import torch
from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, accuracy
from fastai.callback.all import GradientClip
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

BATCH = 64  # images per step, over all replicas


class ReplicaLearner(Learner):
    """A Learner whose batches are divided among the replicas of ``strategy``."""

    strategy: ls.MirroredStrategy

    def _do_one_batch(self) -> None:
        self.mirrored = self.strategy.mirror(self.model)  # the same one each time
        with self.loss_not_reduced():  # one loss a row, which can be divided by the rows of all replicas
            for xb, yb in self.strategy.distribute_dataset([(self.xb, self.yb)], lists="columns"):
                preds, self.losses = self.strategy.run(self._shard, (xb, yb))
        self.pred = self.strategy.gather(preds, axis=0)
        self("after_pred")
        self.whole = self.strategy.reduce("sum", self.losses).detach().requires_grad_(self.training)
        self.loss_grad, self.loss = self.whole.clone(), self.whole.detach().clone()
        self("after_loss")
        if self.training:
            self._do_grad_opt()

    def _shard(self, xb: Any, yb: Any) -> Any:
        pred = self.mirrored(*xb)
        return pred.detach(), ls.compute_average_loss(self.loss_func(pred, *yb))

    def _backward(self) -> None:
        self.loss_grad.backward()  # only to see what callbacks multiply the loss by
        self.strategy.run(lambda loss, factor: loss.backward(factor), (self.losses, self.whole.grad))


def learner(kind: type[Learner], callbacks: Any = (), **named: Any) -> Any:
    """A Learner of digits, with fastai's Adam."""
    torch.manual_seed(0)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, valid = TensorDataset(pixels[:1500], labels[:1500]), TensorDataset(pixels[1500:], labels[1500:])
    dls = DataLoaders.from_dsets(train, valid, bs=BATCH, shuffle=False, drop_last=False, device="cpu", num_workers=0)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return kind(
        dls, network, loss_func=CrossEntropyLossFlat(), cbs=[*callbacks, GradientClip(1.0)], metrics=accuracy, **named
    )


def main(replicas: int) -> None:
    """Trains for two epochs by the one-cycle policy."""
    learn = learner(ReplicaLearner)
    learn.strategy = ls.MirroredStrategy(replicas=replicas)
    with learn.no_mbar():
        learn.fit_one_cycle(2, 0.01)
    loss, right = learn.validate()
    print(f"loss {loss:.4f}, accuracy {right:.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
