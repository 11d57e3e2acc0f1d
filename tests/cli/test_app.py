"""The command from outside: help, versions, words that it does not know, a missing package, a reader that leaves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from unicodedata import east_asian_width

import pytest
from typer.main import get_command

from lockstep_tools.cli import app, main

COMMANDS = [[], ["train"], ["train", "mlm"], ["train", "images"], ["data", "digits"], ["devices"], ["verify"], ["data"]]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*words, "--help"]) == 0
    printed = capsys.readouterr()
    assert "Usage: " in printed.out
    assert printed.err == ""


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]):
    main([*words, "--help"])
    assert f"Example: lockstep {' '.join(words)}".rstrip() in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", app.COMMANDS)
def test_a_command_that_is_not_called_has_the_same_line_of_help(name: str):
    by_itself, beside_it = (get_command(app.tree(called)).commands[name] for called in (name, None))
    assert beside_it.get_short_help_str(limit=200) == by_itself.get_short_help_str(limit=200) == app.COMMANDS[name]


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["trian"], ["plan", "gpt2-xl", "--devices", "8", "--kind", "a100-80gb"]]
)
def test_what_needs_no_torch_does_not_wait_for_it(words: list[str]):
    code = f"import sys; from lockstep_tools.cli import main; main({words}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


def test_the_end_of_a_command_does_not_look_for_cycles():
    code = "import atexit, gc; from lockstep_tools.cli import main; main(['--version']); atexit.register(print, 'end')"
    done = subprocess.run(
        [sys.executable, "-c", f"import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); {code}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ["end", "True"], done.stderr


def test_no_words_are_a_call_for_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "Usage: lockstep" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing command"),
        (["trian"], "; see lockstep --help"),
        (["devices", "--no-such-flag"], "No such option: --no-such-flag"),
        (
            ["train", "mlm", "--epochs", "many"],
            "Invalid value for '--epochs': 'many' is no integer; see lockstep train mlm",
        ),
        (["train", "mlm", "--epochs"], "Option '--epochs' requires an argument; see lockstep train mlm --help"),
        (["train", "mlm", "--epochs", "many"], "; see lockstep train mlm --help"),
        (["train", "mlm", "--data", "no-such-folder"], "the text folder 'no-such-folder' does not exist"),
    ],
)
def test_what_is_not_known_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("lockstep: error: ")
    assert said in printed.err


def test_traceback_shows_where_an_error_was_raised(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "mlm", "--data", "no-such-folder", "--traceback"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback (most recent call last)")
    assert printed.splitlines()[-1].startswith("lockstep: error: the text folder")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((["train", name, "--data", "nowhere"], "'nowhere' does not exist") for name in ("images", "mlm", "reviews")),
        *((["train", name, "--data", ""], "'--data': the path is ''") for name in ("images", "mlm", "reviews")),
        (["train", "images", "--data", "n" * 300], "a name of 300 bytes"),
        (["train", "images", "--data", "\udcff"], r"'\udcff' does not exist"),
        (["train", "images", "--output", " "], "'--output': the path is ' '"),
        (["train", "reviews", "--encoding", "zlib"], "encoding='zlib' is no encoding of text"),
        (["train", "reviews", "--encoding", "utf-99"], "encoding='utf-99' is no encoding of text"),
        (["train", "images", "--epochs", "9" * 99, "--batch-size", "0"], "batch_size=0 was given"),
        (["run", ""], "the script '' does not exist"),
        (["run", "\udcff.py"], r"the script '\udcff.py' does not exist"),
        (["run", "--log-dir", "", "program.py"], "'--log-dir': the path is ''"),
        (["run", "--workers", "9" * 30, "program.py"], "expected at least 1 and at most 4096"),
        (["run", "--stop-s", "nan", "program.py"], "stop_s=nan was given"),
        (["run", "--timeout-s", "nan", "program.py"], "timeout_s=nan was given"),
        (["run", "--timeout-s", "inf", "--hosts", "a:1,b:1", "--index", "0", "program.py"], "timeout_s=inf was given"),
        (["run", "--hosts", "255.255.255.255:1,b:1", "--index", "0", "program.py"], "means many hosts at once"),
        (["run", "--hosts", "224.0.0.1:1,b:1", "--index", "0", "program.py"], "means many hosts at once"),
        (["verify", "--timeout-s", "nan", "program.py"], "timeout_s=nan was given"),
        (["verify", ""], "''"),
        (["devices", "--devices", ""], "''"),
        (["devices", "--devices", "cpu:" + "9" * 30], "cpu:999"),
        (["devices", "--devices", "\udcff"], r"\udcff"),
        (["data", "digits", ""], "the path is ''"),
    ],
)
def test_hostile_words_are_one_line_and_nothing_else(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("print('began')")
    assert main(words) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("lockstep: error: ")
    assert said in err
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lockstep 0.")


def test_the_script_is_installed_beside_python():
    script = Path(sys.executable).parent / "lockstep"
    done = subprocess.run([script, "devices"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cpu:0" in done.stdout


def test_a_reader_that_leaves_is_no_error(start_lockstep):
    process = start_lockstep("devices")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1


def columns(line: str) -> int:
    return sum(2 if east_asian_width(each) in "WF" else 1 for each in line)


@pytest.mark.parametrize(
    "words", [["train", "mlm"], ["train", "images"], ["train", "reviews"], ["bench", "scaling"], ["plan"], ["run"], []]
)
def test_the_help_fits_80_columns_and_names_every_flag_whole(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    main([*words, "--help"])
    out = capsys.readouterr().out
    before_the_example = out.partition("Example:")[0].splitlines()
    assert max(map(columns, before_the_example)) <= 80
    assert len(before_the_example) < 130
    assert "…" not in out
    assert "..." not in out.replace("ARGS]...", "").replace("ARGUMENTS]...", "")


def test_the_flags_of_a_training_are_grouped_in_one_order(capsys: pytest.CaptureFixture[str]):
    shown = []
    for recipe in ("mlm", "images", "reviews"):
        main(["train", recipe, "--help"])
        lines = capsys.readouterr().out.splitlines()
        shown.append([line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z]\w+:", line)])
    assert shown[0] == ["Data", "Model", "Training", "Devices", "Layout", "Output", "Other"]
    assert shown[1] == shown[2] == [title for title in shown[0] if title != "Layout"]
