"""Made-up records of a scaling run, and a browser that says what it shows of a page."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.devices import LogicalDevice, PhysicalDevice
from lockstep_tools.recipes.images.config import ImagesConfig
from lockstep_tools.scaling.configurations import Configuration, Hardware, ScalingSettings, plan
from lockstep_tools.scaling.machine import Machine
from lockstep_tools.scaling.measure import Record, StepTimes
from lockstep_tools.scaling.runner import Sample, ScalingResult, rows_of

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip
# The page in a frame of the width wanted: a headless window is never narrower than 500 pixels.
WRAPPER = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">
<iframe id="frame" style="width:WIDTHpx;height:9000px;border:0" srcdoc="PAGE"></iframe><pre id="seen"></pre>
<script>
const frame = document.getElementById("frame");
const box = (e) => { const r = e.getBoundingClientRect(); return [r.width, r.height]; };
const text = (e) => e.textContent.trim();
frame.addEventListener("load", () => {
  const page = frame.contentDocument, all = (query) => [...page.querySelectorAll(query)];
  document.getElementById("seen").textContent = JSON.stringify({
    title: page.title,
    width: page.documentElement.clientWidth,
    scrolls: page.documentElement.scrollWidth,
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    tables: all("table").map((t) => [...t.rows].map((row) => [...row.cells].map(text))),
    alignments: all("tbody td:not(.words)").map((c) => frame.contentWindow.getComputedStyle(c).textAlign),
    figures: Object.fromEntries(all("figure").map((f) => [f.id, box(f)])),
    plotted: all("svg text").map(text),
    text: text(page.body),
  });
});
</script>"""


@dataclass(frozen=True)
class Shown:
    """What a browser made of a page."""

    seen: dict[str, Any]
    console: list[str]


class Make:
    """Values with the parts filled in that a test does not care about."""

    def devices(self, number: int, *, kind: str = "CPU", physical: int = 1) -> tuple[LogicalDevice, ...]:
        """Logical devices; of GPUs, ``physical`` of them are shared in turn."""
        return tuple(
            LogicalDevice(
                name=f"{kind.lower()}:{index}",
                kind=kind,
                physical=PhysicalDevice(
                    name=f"{kind.lower()}:{index % physical}", kind=kind, memory=None, torch_device=torch.device("cpu")
                ),
                memory_limit=None,
                torch_device=torch.device("cpu"),
            )
            for index in range(number)
        )

    def times(self, step: float, **parts: float) -> StepTimes:
        zero = dict.fromkeys(("input", "forward", "backward", "exchange", "update", "waiting"), 0.0) | parts
        return StepTimes(step=step, **zero, other=step - sum(zero.values()))

    def record(
        self, *step_ms: float, batch: int = 64, steps_an_epoch: int = 10, loss: float = 2.0, **parts: float
    ) -> Record:
        """A record of full batches whose steps took ``step_ms``."""
        return Record(
            step_ms=step_ms,
            parts=tuple(self.times(ms, **parts) for ms in step_ms),
            timed_s=sum(step_ms) / 1000,
            examples=batch * len(step_ms),
            steps_an_epoch=steps_an_epoch,
            loss=loss,
            source="made-up <pictures>",
        )

    def plan(self, *replicas: int, cores: int = 4, devices: int = 4, batch: int = 64) -> tuple[Configuration, ...]:
        settings = ScalingSettings(batch_size=batch, replicas=replicas)
        return plan(settings, Hardware(devices=self.devices(devices), cores=cores))

    def result(self, *, steps_an_epoch: int = 100) -> ScalingResult:
        """A run of the recipe images, of 1, 2 and 4 replicas on 4 cores, that scales well."""
        configurations = self.plan(2, 4)
        steps = (400.0, 130.0, 210.0, 410.0, 110.0, 420.0)
        samples = [
            Sample(
                configuration=configuration,
                round=index,
                record=self.record(
                    ms + index,
                    ms + index + 2,
                    batch=configuration.batch_size,
                    steps_an_epoch=steps_an_epoch,
                    input=1.5,
                    forward=ms * 0.3,
                    backward=ms * 0.5,
                    waiting=3.25,
                ),
            )
            for index in range(3)
            for configuration, ms in zip(configurations, steps, strict=True)
        ]
        return ScalingResult(
            recipe="images",
            title="MobileNetV2, pictures of 32x32, Adam, fp32",
            config=ImagesConfig(),
            settings=ScalingSettings(batch_size=64, replicas=(2, 4), steps=2),
            devices="cpu:4",
            hardware=Hardware(devices=self.devices(4), cores=4),
            date="2026-01-31",
            machine=made_up_machine(),
            rows=tuple(rows_of(configurations, samples)),
            samples=tuple(samples),
        )


def made_up_machine() -> Machine:
    """A machine of no one's."""
    return Machine(
        processor="A <processor>",
        cores=4,
        memory_gb=24.0,
        system="Linux 6",
        python="3.11.7",
        torch="2.13.0",
        transformers="5.0",
        commit="abc",
        load=0.25,
    )


@pytest.fixture
def make() -> Make:
    """Builders of values for these tests."""
    return Make()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of two classes of 20 small pictures each."""
    from PIL import Image  # the benchmark's tests import this file on machines with torch alone

    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        folder = tmp_path / "pictures" / ("odd" if number % 2 else "even")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (32, 32, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return tmp_path / "pictures"


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., Shown]:
    """``browse(page, width=400)``: opens the page in headless Chromium and says what is seen; skips without one."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed (Debian: apt install chromium)")

    def open_(page: str, *, width: int, dark: bool = False) -> Shown:
        wrapper = tmp_path / "wrapper.html"
        wrapper.write_text(WRAPPER.replace("WIDTH", str(width)).replace("PAGE", html.escape(page)))
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        where = f"--user-data-dir={tmp_path / 'profile'}"
        command = [chromium, *FLAGS, scheme, where, f"--window-size={max(width, 500)},1000", "--dump-dom"]
        done = subprocess.run(
            [*command, "--virtual-time-budget=5000", wrapper.as_uri()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        found = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout, re.DOTALL)
        assert found, done.stderr
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return Shown(json.loads(html.unescape(found[1])), console)

    return open_
