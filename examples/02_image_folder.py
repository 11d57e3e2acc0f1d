"""A model of timm learns from folders of images, in bf16, with warm-up and a cosine schedule.

    pip install timm torchvision
    python examples/02_image_folder.py
    python examples/02_image_folder.py --data flowers --model resnet50 --pretrained --size 224 --lr 2e-4

The folder of --data has train/CLASS/*.png and test/CLASS/*.png, images of any size and format. Without --data,
scikit-learn's handwritten digits are written to such folders first.
"""

import argparse
import tempfile
from pathlib import Path

import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchvision import transforms
from torchvision.datasets import ImageFolder

import lockstep as ls


def main() -> None:
    """Trains on the folder given, or on digits."""
    args = parse_arguments()
    if args.data:
        train(args, args.data)
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_digits(Path(folder))
            train(args, Path(folder))


def train(args: argparse.Namespace, folder: Path) -> None:
    """Trains and tests."""
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    torch.manual_seed(0)
    train_images = ImageFolder(folder / "train", transform(args.size, augment=True))
    test_images = ImageFolder(folder / "test", transform(args.size, augment=False))
    # Ordinary loaders of global batches: no DistributedSampler, and the last batch stays as small as it is.
    train = DataLoader(train_images, args.batch_size, shuffle=True, num_workers=args.loading_processes)
    test = DataLoader(test_images, args.batch_size, num_workers=args.loading_processes)

    network = timm.create_model(args.model, pretrained=args.pretrained, num_classes=len(train_images.classes))
    with strategy.scope():
        # Batch norm takes the mean of all rows, as on one device. Without this, each device takes that of its own rows:
        # faster, and good enough from about 16 rows on each.
        model = ls.Model(network, sync_batchnorm=True)
    optimizer = torch.optim.AdamW(network.parameters(), args.lr, weight_decay=0.05)
    # The schedule is stepped once for each update of all devices, so it counts global batches. Neither it nor the rate
    # is scaled by the number of devices: more devices do not change the batch.
    updates, warm_up = args.epochs * len(train), len(train) // 2
    rising, falling = LinearLR(optimizer, 0.01, total_iters=warm_up), CosineAnnealingLR(optimizer, updates - warm_up)
    model.compile(
        optimizer,
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        metrics={"accuracy": MulticlassAccuracy(num_classes=len(train_images.classes), average="micro")},
        scheduler=SequentialLR(optimizer, [rising, falling], [warm_up]),
        precision=args.precision,  # bf16 is for what is computed: weights, gradients and the update stay float32
        clip_norm=1.0,
    )
    model.fit(train, validation_data=test, epochs=args.epochs, verbose=2)
    result = model.evaluate(test, verbose=0)
    chance = max(map(train_images.targets.count, train_images.class_to_idx.values())) / len(train_images)
    print(f"test: loss {result['loss']:.4f}, accuracy {result['accuracy']:.3f} (chance: {chance:.3f})")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    model.save_weights(args.output)  # with the network's own keys: timm.create_model(..., checkpoint_path=...) reads it
    strategy.close()


def transform(size: int, *, augment: bool) -> transforms.Compose:
    """From an image to a tensor [3, size, size]."""
    # torchvision draws from torch's generator: the crops of a run can be repeated, and do not depend on the devices.
    crop = transforms.RandomCrop if augment else transforms.CenterCrop
    normalize = transforms.Normalize([0.5] * 3, [0.5] * 3)
    return transforms.Compose([transforms.Resize(size + size // 8), crop(size), transforms.ToTensor(), normalize])


def write_digits(folder: Path) -> None:
    """Writes scikit-learn's 1,797 images of 8x8 pixels to train/CLASS and test/CLASS, enlarged to 32x32."""
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / ("train" if number < 1500 else "test") / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype("uint8")).resize((32, 32)).save(path)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    parser.add_argument("--data", type=Path, help="folder with train/CLASS and test/CLASS; default: digits")
    parser.add_argument("--model", default="resnet10t", help="a name that timm.list_models() knows")
    parser.add_argument("--pretrained", action="store_true", help="begin with timm's weights, from the hub")
    parser.add_argument("--size", type=int, default=32, help="side of the images, in pixels")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a global batch")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--loading-processes", type=int, default=2, help="of each loader")
    parser.add_argument("--output", type=Path, default=Path("runs/images.safetensors"), help="file of the weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
