"""A detector's batches: boxes of all images behind each other, with an index that says whose they are.

    python examples/clients/detection.py
    python examples/clients/detection.py --devices cpu:4

So are the batches of ultralytics ("batch_idx"), YOLOv5 (the first column of the targets) and others. Which tensors are
flat is said once: ls.divide.by_index("batch_idx", of=["cls", "bboxes"]). The program finds one bright square an image,
and among the images are some without.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep as ls

SIZE = 16


def main() -> None:
    """Trains on 50 images in batches of 12."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    args = parser.parse_args()
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU(), nn.Flatten())
    model = strategy.mirror(nn.Sequential(layers, nn.Linear(16 * SIZE, 5)))  # 4 of a box, and whether there is one
    optimizer = strategy.mirror(torch.optim.Adam(model.parameters(), lr=2e-3))
    batches = strategy.distribute_dataset(
        DataLoader(images(50), batch_size=12, shuffle=True, collate_fn=collated),
        divide=ls.divide.by_index("batch_idx", of=["cls", "bboxes"]),
    )

    def step(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if ls.has_rows(batch["img"]):
            outputs = model(batch["img"])
            # batch_idx counts the images of this device from 0.
            of_boxes = F.smooth_l1_loss(outputs[batch["batch_idx"], :4], batch["bboxes"], reduction="none").sum(1)
            has_box = torch.zeros(len(outputs), device=outputs.device).index_fill(0, batch["batch_idx"], 1.0)
            of_images = F.binary_cross_entropy_with_logits(outputs[:, 4], has_box, reduction="none")
        else:
            of_boxes = of_images = batch["img"].new_zeros(0)
        # A mean over the boxes of all devices, however they are spread over these, and one over all images.
        box_loss, image_loss = ls.compute_average_loss(of_boxes), ls.compute_average_loss(of_images)
        if ls.has_rows(batch["img"]):
            (5 * box_loss + image_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        return box_loss.detach(), image_loss.detach()

    for epoch in range(20):
        sums = [strategy.reduce("sum", strategy.run(step, args=(batch,))) for batch in batches]
        if epoch % 5 == 4:
            box_loss, image_loss = (sum(losses).item() / len(sums) for losses in zip(*sums, strict=True))
            print(f"epoch {epoch + 1}: loss of boxes {box_loss:.4f}, of images {image_loss:.4f}")
    strategy.close()


def images(number: int) -> list[tuple[Tensor, Tensor]]:
    """Dark images [1, 16, 16], two of three with a bright square, and its box [boxes, 4] in parts of the image."""
    random = torch.Generator().manual_seed(0)
    made = []
    for index in range(number):
        image, boxes = 0.1 * torch.rand(1, SIZE, SIZE, generator=random), torch.zeros(0, 4)
        if index % 3:
            left, top, width = (int(torch.randint(3, 8, (), generator=random)) for _ in range(3))
            image[0, top : top + width, left : left + width] += 1
            boxes = torch.tensor([[left, top, left + width, top + width]]) / SIZE
        made.append((image, boxes))
    return made


def collated(examples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The batch that ultralytics makes: flat boxes and classes, and the number of each one's image."""
    tensors, boxes = zip(*examples, strict=True)
    index = torch.arange(len(boxes)).repeat_interleave(torch.tensor([len(of_image) for of_image in boxes]))
    return {
        "img": torch.stack(tensors),
        "cls": torch.zeros(len(index), 1),
        "bboxes": torch.cat(boxes),
        "batch_idx": index,
    }


if __name__ == "__main__":
    main()
