"""What others printed for workload B: shown as a footnote, for the shape of the curve and never as a rival.

Seconds an epoch of MobileNetV2 at 224x224 under TensorFlow's MirroredStrategy on four GTX 1080 Ti, from a published
tutorial on ``tf.distribute``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One data set's seconds an epoch, and what follows from them.

    Args:
        data: its name.
        one_s: one GPU, batch 64.
        same_s: four GPUs, 64 in all.
        times_s: four GPUs, 256 in all.
    """

    data: str
    one_s: float
    same_s: float
    times_s: float

    @property
    def same_speed_up(self) -> float:
        """Of four GPUs at the same total."""
        return self.one_s / self.same_s

    @property
    def times_speed_up(self) -> float:
        """Of four GPUs at four times the total."""
        return self.one_s / self.times_s


PUBLISHED_TITLE = "Published, on another machine"
PUBLISHED_NOTE = (
    "Seconds an epoch that a tutorial on tf.distribute printed for MobileNetV2 at 224x224 on 4 x GTX 1080 Ti. Another "
    "machine, another library, other data: not measured here and not to be compared with the times above."
)
PUBLISHED = {
    "images": (
        PublishedRow(data="cats_vs_dogs", one_s=146, same_s=39, times_s=29),
        PublishedRow(data="tf_flowers", one_s=22, same_s=7, times_s=5),
    )
}
PUBLISHED_HEADINGS = (
    "data",
    "1 GPU, batch 64",
    "4 GPUs, total 64",
    "4 GPUs, total 256",
    "speed-up, total 64",
    "speed-up, total 256",
)


def published_cells(row: PublishedRow) -> list[str]:
    """A row of the table; the two speed-ups are those of the two columns before them."""
    seconds = (f"{value:.0f}" for value in (row.one_s, row.same_s, row.times_s))
    return [row.data, *seconds, f"{row.same_speed_up:.2f}", f"{row.times_speed_up:.2f}"]
