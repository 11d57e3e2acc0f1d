"""A DCGAN, of two networks with an optimizer each, draws handwritten digits and says how far they are from real ones.

python examples/05_dcgan.py
python examples/05_dcgan.py --devices cpu:4
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep as ls

LATENT = 32


def main() -> None:
    """Trains both networks by turns, and measures the generator."""
    args = parse_arguments()
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    torch.manual_seed(0)
    # With sync_batchnorm the statistics are those of all rows, as on one device.
    generator = strategy.mirror(make_generator(), sync_batchnorm=True)
    discriminator = strategy.mirror(make_discriminator(), sync_batchnorm=True)
    generator_optimizer = strategy.mirror(torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.999)))
    discriminator_optimizer = strategy.mirror(torch.optim.Adam(discriminator.parameters(), 5e-4, betas=(0.5, 0.999)))
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # [1797, 1, 8, 8], -1 to 1
    noise = torch.randn(len(images), LATENT)
    batches = strategy.distribute_dataset(DataLoader(images, 128, shuffle=True, collate_fn=with_noise))

    def step(real: Tensor, noise: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        def mean(logits: Tensor, is_real: bool) -> Tensor:
            target = torch.full_like(logits, 0.9 if is_real else 0.0)
            per_example = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            return ls.compute_average_loss(per_example, global_batch_size=rows)

        fake = generator(noise)
        # Without `detach` the first backward pass would also go through the generator.
        discriminator_loss = mean(discriminator(real), True) + mean(discriminator(fake.detach()), False)
        discriminator_loss.backward()
        discriminator_optimizer.step()

        generator_loss = mean(discriminator(fake), True)
        generator_loss.backward()
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        discriminator_optimizer.zero_grad()  # both backward passes went through the discriminator
        return discriminator_loss.detach(), generator_loss.detach()

    def report(when: str) -> Tensor:
        generator.eval()
        with torch.no_grad():
            drawn = generator(noise.to(strategy.devices[0].torch_device)).cpu()  # outside of `run`: the first device
        generator.train()
        print(f"{when}: distance to real images {distance(drawn, images):.2f}")
        return drawn

    print(f"one half of the real images: distance to the other half {distance(images[::2], images[1::2]):.2f}")
    report("untrained")
    for epoch in range(args.epochs):
        for real, random in batches:
            losses = strategy.run(step, args=(real, random, sum(map(len, real))))
            discriminator_loss, generator_loss = strategy.reduce("sum", losses)
        if (epoch + 1) % 5 == 0 or epoch + 1 == args.epochs:
            drawn = report(f"epoch {epoch + 1}: losses {discriminator_loss:.4f} and {generator_loss:.4f}")
    for line in drawn[:3, 0].add(1).mul(2.49).long().transpose(0, 1):  # the first line of each image, the second ...
        print("   ".join("".join(" .:*#"[shade] * 2 for shade in row) for row in line))
    strategy.close()


def with_noise(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A global batch of real images, with noise for as many drawn ones.

    As part of the batch it is the same on any number of devices. Drawn in the step it would be each device's own.
    """
    return torch.stack(rows), torch.randn(len(rows), LATENT)


def make_generator() -> nn.Module:
    """From noise [rows, LATENT] to images [rows, 1, 8, 8]."""
    return nn.Sequential(
        nn.Unflatten(1, (LATENT, 1, 1)),
        nn.ConvTranspose2d(LATENT, 64, 2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip


def make_discriminator() -> nn.Module:
    """From images [rows, 1, 8, 8] to one logit for each, [rows]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
        nn.Conv2d(64, 1, 2), nn.Flatten(0),
    )  # fmt: skip


def distance(some: Tensor, others: Tensor) -> float:
    """The Frechet distance of two sets of images, as in FID but of pixels."""
    some, others = some.flatten(1).double(), others.flatten(1).double()
    product = torch.linalg.eigvals(some.T.cov() @ others.T.cov()).real.clamp(min=0).sqrt().sum()
    means = (some.mean(0) - others.mean(0)).square().sum()
    return (means + some.T.cov().trace() + others.T.cov().trace() - 2 * product).item()


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    parser.add_argument("--epochs", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
