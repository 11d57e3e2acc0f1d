"""PPO's loss of TorchRL on all replicas of one process: batches are TensorDicts, divided by row.

python examples/clients/torchrl_ppo.py
"""

import sys

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

import lockstep as ls


def networks() -> tuple[ProbabilisticActor, ValueOperator]:
    """An actor of two actions, and a critic."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(layers, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["observation"])
    return actor, critic


def frames(actor: ProbabilisticActor) -> list[TensorDict]:
    """What a collector has sampled, in batches of which the last is not full; here at random."""
    torch.manual_seed(1)
    batches = []
    for rows in (32, 32, 32, 32, 32, 32, 32, 13):
        with torch.no_grad():
            batch = actor(TensorDict({"observation": torch.randn(rows, 4)}, [rows]))
        batch["advantage"], batch["value_target"] = torch.randn(rows, 1), torch.randn(rows, 1)
        batches.append(batch)
    return batches


def train_on_one_device() -> ClipPPOLoss:
    """TorchRL's own loop."""
    actor, critic = networks()
    loss = ClipPPOLoss(actor, critic, entropy_bonus=False)
    optimizer = torch.optim.SGD(loss.parameters(), 0.1)
    for batch in frames(actor):
        losses = loss(batch)
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
        optimizer.step()
    return loss


def train(replicas: int) -> ClipPPOLoss:
    """The same on replicas."""
    strategy = ls.MirroredStrategy(replicas=replicas)
    actor, critic = networks()
    loss = ClipPPOLoss(actor, critic, entropy_bonus=False, reduction="none")
    mirrored = strategy.mirror(loss)
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))

    def step(batch: TensorDict) -> Tensor:
        losses = mirrored(batch)
        total = ls.compute_average_loss(losses["loss_objective"]) + ls.compute_average_loss(losses["loss_critic"])
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(mirrored.parameters(), 1.0)
        optimizer.step()
        return total.detach()

    for batch in strategy.distribute_dataset(frames(actor)):
        total = strategy.reduce("sum", strategy.run(step, (batch,)))
    print(f"loss {float(total):.4f}")
    return loss


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
