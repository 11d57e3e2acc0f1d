#!/usr/bin/env bash
# typer 0.29 reads values with pydantic. Where a text is no number, its error leaves out the text, which click's errors
# and typer's own error for a wrong choice name; the latter begins with pydantic's words "Value error".
#
# Seen: typer 0.29.2, Python 3.11. The script fails if another version behaves in another way.
# In Lockstep: the command adds the text ("'many' is no integer", src/lockstep_tools/cli/app.py, tests/cli/test_app.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check typer==0.29.2
"$folder/venv/bin/python" - <<'PY'
from typing import Literal

import typer
from typer.main import get_command

app = typer.Typer(add_completion=False)


@app.command()
def train(epochs: int = 1, precision: Literal["fp32", "bf16"] = "fp32") -> None: ...


texts = {}
for flag, value in (("--epochs", "many"), ("--precision", "fp99")):
    try:
        get_command(app).main([flag, value], standalone_mode=False)
    except typer.TyperException as error:
        texts[flag] = error.format_message()
        print(f"typer {typer.__version__}, {flag} {value}: {texts[flag]}")
assert "many" not in texts["--epochs"], "typer names the text now"
assert texts["--precision"].partition(": ")[2].startswith("Value error, 'fp99'"), "typer says it in other words now"
PY
