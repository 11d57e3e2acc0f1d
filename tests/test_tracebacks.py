"""Which frames of an error IPython is told to leave out, and which ours and a Ctrl-C leave out anywhere."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from subprocess import Popen
from types import SimpleNamespace, TracebackType

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.errors import CallbackError, ConfigError, LockstepError, NonFiniteLossError
from lockstep.tracebacks import format_for_user


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return own_function(x)


def own_function(x: torch.Tensor) -> torch.Tensor:
    if len(x):
        raise ArithmeticError("mine")
    return x


def shown_frames(error: BaseException) -> list[str]:
    """The functions that IPython shows, as it finds them out."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame.f_code.co_name for frame in frames if not frame.f_locals.get("__tracebackhide__")]


SHELL = SimpleNamespace(InteractiveTB=SimpleNamespace(skip_hidden=True))


@pytest.fixture
def ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SHELL))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.usefixtures("ipython")
def test_ipython_shows_the_users_frames_of_an_error_in_fit(replicas: int):
    strategy = ls.MirroredStrategy(replicas=replicas)
    with strategy.scope():
        model = ls.Model(nn.Sequential(nn.Linear(2, 1), Own()))
        model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=nn.functional.mse_loss)

    with pytest.raises(ArithmeticError) as caught:
        model.fit([(torch.ones(4, 2), torch.ones(4, 1))], verbose=0)
    strategy.close()

    test, *others = shown_frames(caught.value)
    assert test.startswith("test_ipython")
    assert others == ["forward", "forward", "own_function"]  # of Sequential and of Own


@pytest.mark.usefixtures("ipython")
def test_ipython_shows_the_users_step_of_a_loop_of_ones_own():
    strategy = ls.MirroredStrategy(replicas=2)
    with pytest.raises(ArithmeticError) as caught:
        strategy.run(own_function, (torch.ones(2),))
    strategy.close()
    assert shown_frames(caught.value)[1:] == ["own_function"]


@pytest.mark.usefixtures("ipython")
@pytest.mark.parametrize(("skip_hidden", "ours"), [(True, False), (False, True)])
def test_ipython_ends_with_torch_s_call_where_ours_stands_for_torch_s_function(
    skip_hidden: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SHELL.InteractiveTB, "skip_hidden", skip_hidden)
    strategy = ls.MirroredStrategy(replicas=2)
    with strategy.scope():
        model = ls.Model(nn.Sequential(nn.Linear(2, 1)))
        model.compile("sgd", "mse")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model.fit([(torch.ones(4, 3), torch.ones(4, 1))], verbose=0)
    strategy.close()

    *_, last = traceback.walk_tb(caught.value.__traceback__)
    assert last[0].f_globals["__name__"].startswith("lockstep.") == ours
    assert shown_frames(caught.value)[-2:] == ["forward", "forward"]  # of Sequential and of Linear


@pytest.mark.usefixtures("ipython")
def test_after_ctrl_c_only_the_callers_frames_are_shown():
    def interrupt() -> None:
        raise KeyboardInterrupt

    strategy = ls.MirroredStrategy(replicas=1)
    with pytest.raises(KeyboardInterrupt) as caught:
        strategy.run(interrupt)
    strategy.close()
    assert shown_frames(caught.value) == ["test_after_ctrl_c_only_the_callers_frames_are_shown"]


def test_without_ipython_a_ctrl_c_shows_the_callers_frames_and_those_of_what_is_called():
    class Rows:
        def __iter__(self) -> Iterator[torch.Tensor]:
            raise KeyboardInterrupt

    strategy = ls.MirroredStrategy(replicas=2)
    with strategy.scope():
        model = ls.Model(nn.Linear(2, 1))
        model.compile("sgd", "mse")
    with pytest.raises(KeyboardInterrupt) as caught:
        model.fit(Rows(), verbose=0)
    strategy.close()

    test, *others = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert test.startswith("test_without_ipython")
    assert others == ["__iter__"]


@pytest.mark.parametrize(("skip_hidden", "functions"), [(True, ["asked"]), (False, ["asked", "__init__"])])
def test_the_traceback_of_an_error_of_our_own_ends_with_the_users_call(
    skip_hidden: bool, functions: list[str], monkeypatch: pytest.MonkeyPatch
):
    def structured_traceback(kind: object, error: object, given: TracebackType) -> list[str]:
        return [frame.f_code.co_name for frame, _ in traceback.walk_tb(given)]

    formatter = SimpleNamespace(skip_hidden=skip_hidden, structured_traceback=structured_traceback)
    shell = SimpleNamespace(InteractiveTB=formatter)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))

    def asked() -> None:
        ls.Model("a string")  # type: ignore[arg-type]

    with pytest.raises(ConfigError) as caught:
        asked()

    _, *others = caught.value._render_traceback_()
    assert others == functions


def test_without_ipython_every_frame_is_shown():
    strategy = ls.MirroredStrategy(replicas=1)
    with pytest.raises(ArithmeticError) as caught:
        strategy.run(own_function, (torch.ones(2),))
    strategy.close()
    assert "run" in shown_frames(caught.value)


PROGRAM = """
import sys
import traceback
import torch
import lockstep as ls

strategy = ls.MirroredStrategy(replicas=2)
mirrored = strategy.mirror(torch.nn.Sequential(torch.nn.Linear(3, 1)))

def ours():
    ls.MirroredStrategy(replicas=0)

def own():
    raise ValueError("mine")

def after_ours():
    try:
        ours()
    except ValueError:
        strategy.run(own)

def forward():
    mirrored(torch.ones(2, 4))

def backward():
    torch.ones(2, requires_grad=True).backward()

def lacking(argument):
    pass

def without_ours():
    torch.nn.Linear(3, 1)(torch.ones(4))

def shown(call, *args):
    print(call.__name__, *(arg.__name__ for arg in args), file=sys.stderr)
    try:
        call(*args)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if args:
            assert "runner.py" in "".join(traceback.format_exception(error))

shown(after_ours)
for step in (own, forward, backward, lacking):
    shown(strategy.run, step)
shown(without_ours)
ours()
"""


def test_uncaught_errors_have_the_frames_that_one_device_would_show(python: Callable[..., Popen[str]]):
    frames = functions_in(python("-c", PROGRAM))

    assert frames["after_ours"] == ["after_ours", "ours", "shown", "after_ours", "own"]
    assert frames["run own"] == ["shown", "own"]
    assert frames["run forward"] == ["shown", "forward", "forward", "forward"]  # of Sequential and Linear
    assert frames["run backward"] == ["shown", "backward", "backward", "backward", "_make_grads"]
    assert frames["run lacking"] == ["shown", "_call_watched"]  # the last frame stays, which calls the step
    assert frames["without_ours"][:2] == ["shown", "without_ours"]
    assert "_call_impl" in frames["without_ours"]
    assert "forward" in frames["without_ours"]
    assert frames["without_ours"][-2:] == ["<module>", "ours"]


def test_a_variable_brings_all_frames_back(python: Callable[..., Popen[str]]):
    frames = functions_in(python("-c", PROGRAM, LOCKSTEP_TRACEBACK="full"))
    assert {"job", "_call_impl"} <= set(frames["run forward"])
    assert frames["without_ours"][-1] == "check_number"


def functions_in(program: Popen[str]) -> dict[str, list[str]]:
    """The functions that a program's tracebacks show, under the line that it prints before each."""
    frames: dict[str, list[str]] = {}
    lines = []
    for line in program.communicate(timeout=60)[1].splitlines():
        if line.startswith("  File"):
            lines.append(line.partition(", in ")[2])
        elif line.replace("_", "").replace(" ", "").isalpha():
            lines = frames.setdefault(line, [])
    return frames


def fitted(loss_of: float, *callbacks: ls.Callback) -> None:
    strategy = ls.MirroredStrategy(replicas=2)
    with strategy.scope():
        model = ls.Model(nn.Linear(2, 1))
        model.compile("sgd", "mse")
    try:
        model.fit([(torch.full((4, 2), loss_of), torch.ones(4, 1))], verbose=0, callbacks=callbacks)
    finally:
        strategy.close()


def functions_shown(error: LockstepError) -> list[str]:
    lines = format_for_user(error, error.__traceback__, LockstepError).splitlines()
    return [line.rpartition(" in ")[2] for line in lines if line.startswith("  File")]


def test_an_error_of_ours_that_led_to_another_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NonFiniteLossError) as caught:
        fitted(float("nan"))

    assert functions_shown(caught.value)[1:] == ["fitted"]
    assert format_for_user(caught.value, caught.value.__traceback__, LockstepError).count("the loss is nan") == 1
    causes = []
    formatter = SimpleNamespace(
        skip_hidden=True, structured_traceback=lambda _, error, __: causes.append(error.__cause__)
    )
    shell = SimpleNamespace(InteractiveTB=formatter)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    caught.value._render_traceback_()
    assert causes == [None]
    assert isinstance(caught.value.__cause__, NonFiniteLossError)
    assert "train_step" in "".join(traceback.format_exception(caught.value))  # the exception has its frames


def test_the_users_error_that_led_to_one_of_ours_is_shown_with_the_users_frames():
    class Broken(ls.Callback):
        def on_epoch_end(self, epoch: int, logs: object) -> None:
            own_function(torch.ones(1))

    with pytest.raises(CallbackError) as caught:
        fitted(1.0, Broken())
    *cause, test, call = functions_shown(caught.value)
    assert cause == ["on_epoch_end", "own_function"]
    assert (test[:14], call) == ("test_the_users", "fitted")
