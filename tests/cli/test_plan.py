"""``lockstep plan``: the table, the call that it names and one line for what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep_tools.cli import main

MODEL = [
    "plan",
    "gpt-3",
    "--devices",
    "64",
    "--batch",
    "64",
    "--sequence",
    "2048",
    "--tensor",
    "8",
    "--microbatch-size",
    "1",
]
A100 = ["--kind", "a100-80gb"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table_ends_in_the_call_of_the_best(capsys: pytest.CaptureFixture[str]):
    code, out, err = said(capsys, *MODEL, *A100, "--activation-checkpointing", "full", "--schedule", "interleaved")
    lines = out.splitlines()

    assert (code, err) == (0, "")
    assert lines[0] == "gpt-3: 174.6 billion parameters, 96 layers of 12,288, 96 heads, sequences of 2,048 tokens"
    assert lines[1] == (
        "64 x a100-80gb (80 GiB, 312 TFLOP/s in bf16), 8 in a host on nvlink3, hdr between hosts; global batch 64"
    )
    assert "data  pipeline  tensor  step s" in out
    assert "microbatches  schedule" in out
    assert "best: ls.ParallelStrategy(data=1, pipeline=8, tensor=8, microbatches=64, " in out
    assert "gradient checkpointing" in out
    assert all(len(line) < 150 for line in lines)


def test_the_docs_show_what_the_command_says(capsys: pytest.CaptureFixture[str]):
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "plan.md").read_text()
    command = text.split("```bash\nlockstep ", 1)[1].split("\n", 1)[0]
    _, out, _ = said(capsys, *command.split())
    assert f"```text\n{out}```" in text


def test_links_and_hosts_can_be_given(capsys: pytest.CaptureFixture[str]):
    words = (*MODEL, *A100, "--per-host", "4")
    _, slow, _ = said(capsys, *words, "--link", "pcie4,1.25@50")
    _, fast, _ = said(capsys, *words, "--link", ",ndr")
    assert "on pcie4, 1.25@50 between hosts" in slow
    assert "on nvlink3, ndr between hosts" in fast
    assert slow.splitlines()[5:] != fast.splitlines()[5:]


def test_the_recipe_is_planned_for_a_device_by_its_figures(capsys: pytest.CaptureFixture[str]):
    code, out, _ = said(capsys, "plan", "mlm", "--devices", "2", "--kind", "48,864,362", "--microbatch-size", "8")
    assert code == 0
    assert out.startswith("mlm: 4.4 million parameters, 2 layers of 128, 2 heads, sequences of 512 tokens\n2 x ")
    assert "best: ls.ParallelStrategy(" in out


def test_modules_of_a_transformers_model_are_listed(capsys: pytest.CaptureFixture[str]):
    model = "type=gpt2, n_layer=2, n_embd=32, n_head=4, vocab_size=100, n_positions=64"
    code, out, _ = said(capsys, "plan", model, "--devices", "2", *A100, "--modules")
    rows = {cells[0]: cells[1:] for line in out.splitlines() if len(cells := line.split()) == 4}
    assert code == 0
    # 4 x 32 x 32 + 8 x 32 x 32 weights, 9 x 32 biases and two norms; two operations a weight, and attention's products
    assert rows["transformer.h.*"] == ["2", f"{2 * (12 * 32**2 + 13 * 32):,}", "0.1"]
    assert rows["transformer.wte"] == ["1", "3,200", "0.0"]
    assert out.index("transformer.h.*") < out.index("gpt2: 30,720 parameters, 2 layers of 32, 4 heads")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["gpt2", "--devices", "2", *A100, "--modules"],
            "--modules was given with 'gpt2', of which only sizes are known",
        ),
        (["type=lama", "--devices", "2", *A100], "'lama' has model_type='lama', expected one of the "),
        (["gpt-3", "--devices", "64"], "Missing option '--kind'"),
        (["gpt-3", "--devices", "0", *A100], "--devices 0 was given, expected at least 1"),
        (["gpt2", "--devices", "2", *A100, "--top", "0"], "--top 0 was given, expected at least 1"),
        (["gpt2", "--devices", "8", *A100, "--tensor", "8"], "tensor=8 does not divide heads=12; choose 1, 2, 3, 4, 6"),
        (["gpt-3", "--devices", "8", *A100], "no layout of gpt-3 on 8 x a100-80gb fits: the smallest needs"),
        (
            ["gpt2", "--devices", "8", *A100, "--link", "string"],
            "the link 'string' is not known; choose one of nvlink2",
        ),
    ],
)
def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], line: str):
    code, out, err = said(capsys, "plan", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"lockstep: error: {line}")
    assert err.count("\n") == 1
