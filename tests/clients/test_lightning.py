"""The program of examples/clients on replicas gives Lightning's own numbers, and so does ``pytorch_lightning``.

What a LightningModule may do is tested in tests/integrations/test_lightning.py.
"""

from __future__ import annotations

import logging
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

try:  # here, since Lightning sets environment variables
    import lightning  # noqa: F401
    import pytorch_lightning
except (ImportError, RuntimeError) as error:  # torchmetrics imports torchvision, which may be of another torch
    pytest.skip(f"Lightning cannot be imported: {error}", allow_module_level=True)

from lockstep.integrations.lightning import LockstepStrategy
from lockstep.integrations.pytorch_lightning import LockstepStrategy as PytorchLightningStrategy

PROGRAM = Path(__file__).parents[2] / "examples" / "clients" / "lightning_fit.py"

pytestmark = pytest.mark.filterwarnings("ignore:.*(treespec|does not have many workers).*")


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_program_equals_one_device(replicas: int, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    train = runpy.run_path(str(PROGRAM))["train"]
    expected, line = train("auto"), capsys.readouterr().out
    same = train(LockstepStrategy(replicas=replicas))
    for weight, other in zip(expected.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-6, atol=1e-6)
    assert capsys.readouterr().out == line


def test_pytorch_lightning_has_a_strategy_of_its_own() -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Network(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).pow(2).mean()
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def trained(strategy: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module, rows = Network(), torch.randn(29, 4)
        quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
        trainer = pytorch_lightning.Trainer(accelerator="cpu", strategy=strategy, max_epochs=2, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(rows, 8))
        return module, trainer.callback_metrics["loss_epoch"]

    (expected, loss), (same, other) = trained("auto"), trained(PytorchLightningStrategy(replicas=3))
    torch.testing.assert_close(dict(same.named_parameters()), dict(expected.named_parameters()), rtol=0, atol=1e-6)
    torch.testing.assert_close(other, loss, rtol=0, atol=1e-6)
