"""What hooks of every kind see on a layout: how often they are called, and with what, against one device by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object

ROWS, UPDATES, MICROBATCHES = 12, 2, 4
LAYOUTS: Mapping[str, dict[str, Any] | None] = {
    "many workers": None,
    "data": {"data": 2},
    "shard_optimizer": {"data": 2, "shard_optimizer": True},
    "pipeline": {"pipeline": 2, "microbatches": MICROBATCHES},
    "tensor": {"tensor": 2},
    "shard_parameters": {"data": 2, "shard_parameters": True},
}
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
Calls = list[list[Any]]
"""Of each call the tensors that it saw, or their outlines."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(ROWS, 4, generator=random).double(), torch.randn(ROWS, 2, generator=random).double())
        for _ in range(number)
    ]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def seen(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [torch.empty(0) if each.grad is None else each.grad.clone() for each in parameters]


def outline(tensor: Tensor) -> tuple[int, bool]:
    """Its rows, and whether it is a DTensor. A hook that keeps tensors outside of the module is refused."""
    return len(tensor), isinstance(tensor, DTensor)


def no_more_than(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.05, 0.05)


# Each kind puts hooks on a module (``before``) or an optimizer (``around``), which note their calls.


def forward(module: nn.Sequential, calls: Calls, _: ExitStack) -> None:
    module[2].register_forward_hook(lambda _, inputs, __: calls.append([outline(inputs[0])]))


def backward(module: nn.Sequential, calls: Calls, _: ExitStack) -> None:
    module[2].register_full_backward_hook(lambda _, __, outputs: calls.append([outline(outputs[0])]))


def on_gradient(weight: Tensor, calls: Calls) -> None:
    weight.register_hook(lambda gradient: (calls.append([gradient.clone()]), no_more_than(gradient))[1])


def on_accumulated(weight: Tensor, calls: Calls) -> None:
    def clamp(parameter: Any) -> None:
        calls.append([parameter.grad.clone()])
        parameter.grad = no_more_than(parameter.grad)

    weight.register_post_accumulate_grad_hook(clamp)


def early(register: Callable[[Tensor, Calls], None], name: str) -> Callable[..., None]:
    return lambda module, calls, _: register(module.get_parameter(name), calls)


def late(register: Callable[[Tensor, Calls], None], at: int) -> Callable[..., None]:
    """On a parameter that compile's function was given, by its size: stages have some of them."""
    sizes = [tuple(parameter.shape) for parameter in net().parameters()]

    def around(optimizer: torch.optim.Optimizer, calls: Calls, _: ExitStack) -> None:
        parameters = optimizer.param_groups[0]["params"]
        chosen = [each for each in parameters if tuple(each.shape) == sizes[at]] or parameters[at : at + 1]
        for parameter in chosen:
            register(parameter, calls)

    return around


def pre_step(optimizer: torch.optim.Optimizer, calls: Calls, _: ExitStack) -> None:
    optimizer.register_step_pre_hook(lambda optimizer, *_: calls.append(seen(optimizer)))


def post_step(optimizer: torch.optim.Optimizer, calls: Calls, _: ExitStack) -> None:
    optimizer.register_step_post_hook(lambda optimizer, *_: calls.append(seen(optimizer)))


def all_optimizers(optimizer: torch.optim.Optimizer, calls: Calls, stack: ExitStack) -> None:
    def note(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if stepped is optimizer:
            calls.append(seen(stepped))

    stack.callback(register_optimizer_step_pre_hook(note).remove)
    stack.callback(register_optimizer_step_post_hook(lambda *_: None).remove)


def replaced(optimizer: torch.optim.Optimizer, calls: Calls, _: ExitStack) -> None:
    step = optimizer.step

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(seen(optimizer))
        return step(*args, **kwargs)

    optimizer.step = wrapped  # type: ignore[method-assign]


def scheduler(optimizer: torch.optim.Optimizer, calls: Calls, _: ExitStack) -> StepLR:
    scheduler = StepLR(optimizer, 1, 0.5)
    step = scheduler.step

    def counted(*args: Any) -> None:
        calls.append([])
        step(*args)

    scheduler.step = counted  # type: ignore[method-assign]
    return scheduler


NOTHING = "nothing"
BEFORE: Mapping[str, Callable[..., Any]] = {
    "forward": forward,
    "backward": backward,
    "gradient, before": early(on_gradient, "2.weight"),
    "accumulated, before": early(on_accumulated, "2.weight"),
}
AROUND: Mapping[str, Callable[..., Any]] = {
    "gradient, in compile": late(on_gradient, 2),
    "accumulated, in compile": late(on_accumulated, 2),
    "gradient of a whole weight, in compile": late(on_gradient, 3),
    "pre hook": pre_step,
    "post hook": post_step,
    "all optimizers": all_optimizers,
    "replaced step": replaced,
    "scheduler": scheduler,
}
KINDS = (*BEFORE, *AROUND)


def one_device(kind: str, *, accumulate: int = 1, clip_norm: float | None = None) -> tuple[Calls, dict[str, Tensor]]:
    """The calls and the weights of one device. Gradients accumulate before the hooks of an optimizer see them."""
    module, calls = net(), Calls()
    with ExitStack() as stack:
        if kind in BEFORE:
            BEFORE[kind](module, calls, stack)
        optimizer = torch.optim.SGD(module.parameters(), 0.5)
        rate = AROUND[kind](optimizer, calls, stack) if kind in AROUND else None
        for index, (x, y) in enumerate(batches(UPDATES * accumulate)):
            (loss(module(x), y).mean() / accumulate).backward()
            if (index + 1) % accumulate == 0:
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                if rate is not None:
                    rate.step()
    return calls, module.state_dict()


def observed(strategy: Any, kind: str, *, accumulate: int = 1, clip_norm: float | None = None) -> str:
    """What a hook of this kind sees in a training by fit, in words; "refused", or what is wrong."""
    expected, weights = one_device(kind, accumulate=accumulate, clip_norm=clip_norm)
    calls, module = Calls(), net()
    with ExitStack() as stack, strategy.scope(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        schedulers: list[Any] = []

        def make(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, 0.5)
            schedulers.append(AROUND[kind](optimizer, calls, stack) if kind in AROUND else None)
            return optimizer

        try:
            if kind in BEFORE:
                BEFORE[kind](module, calls, stack)
            divided = isinstance(strategy, ls.ParallelStrategy)
            model = ls.Model(strategy.parallelize(module, tensor_plan=PLAN) if divided else module)
            chosen = {"scheduler": lambda _: schedulers[0]} if kind == "scheduler" else {}
            model.compile(make, loss, accumulate=accumulate, clip_norm=clip_norm, **chosen)
            model.fit(batches(UPDATES * accumulate), verbose=0)
        except ls.errors.UsageError:
            return "refused"
        trained = model.state_dict()
    words = [in_words(calls, expected, strategy)]
    if any("is called around" in str(each.message) or "backward hook" in str(each.message) for each in warned):
        words.append("warned")
    if not all(torch.allclose(trained[name], weights[name], rtol=1e-9, atol=1e-12) for name in weights):
        words.append("other weights")
    return ", ".join(words)


def in_words(calls: Calls, expected: Calls, strategy: Any) -> str:
    """How many calls an update makes, and what they see beside the calls of one device."""
    number, rest = divmod(len(calls), UPDATES)
    if not number or rest:
        return f"{len(calls)} calls" if rest else "0"
    if number == len(expected) // UPDATES and all(map(same, calls, expected)):
        return f"{number}, whole"
    local = len(strategy.devices)
    if calls[0] and not isinstance(calls[0][0], Tensor):
        rows, divided = calls[0][0]
        of = {ROWS // strategy.num_replicas_in_sync: "a replica", ROWS // MICROBATCHES: "a microbatch"}
        return f"{number // local}, rows of {of.get(rows, 'a replica')}{', DTensor' * divided}"
    return f"{number}, part"


def same(call: list[Tensor], other: list[Tensor]) -> bool:
    return len(call) == len(other) and all(
        isinstance(one, Tensor) and one.shape == two.shape and torch.allclose(one, two, rtol=1e-9, atol=1e-12)
        for one, two in zip(call, other, strict=True)
    )


def run_jobs(layouts: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """On two workers: for each layout and kind what each worker's hooks see."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[str]]] = {}
    for layout in layouts:
        found[layout], grid = {}, LAYOUTS[layout]
        strategy = ls.MultiWorkerMirroredStrategy(seed=0) if grid is None else ls.ParallelStrategy(seed=0, **grid)
        workers = strategy.workers if grid is None else strategy.workers.processes
        for kind in KINDS:
            found[layout][kind] = all_gather_object(workers, "what hooks have seen", observed(strategy, kind))
        strategy.close()
    return found


def loop(grid: Mapping[str, Any], register: str, name: str, *, early: bool) -> tuple[int, dict[str, Tensor]]:
    """How often a loop on a layout calls a hook that halves gradients, and the weights."""
    torch.set_num_threads(1)
    strategy, module, calls = ls.ParallelStrategy(seed=0, device="cpu:0", **grid), net(), list[int]()
    if early:
        halve(module.get_parameter(name), register, calls)
    mirrored = strategy.parallelize(module, tensor_plan=PLAN)
    optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.5))
    if not early:
        halve(dict(mirrored.named_parameters())[name], register, calls)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        ls.compute_average_loss(loss(mirrored(x), y)).backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(batches(UPDATES)):
        strategy.run(step, batch)
    weights = {name: value.clone() for name, value in mirrored.state_dict().items()}
    strategy.close()
    return len(calls), weights


def loop_by_hand(register: str, name: str) -> dict[str, Tensor]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    halve(module.get_parameter(name), register, [])
    for x, y in batches(UPDATES):
        optimizer.zero_grad()
        loss(module(x), y).mean().backward()
        optimizer.step()
    return module.state_dict()


def halve(parameter: Any, register: str, calls: list[int]) -> None:
    def hook(tensor: Tensor) -> Tensor | None:
        calls.append(1)
        if register == "register_hook":
            return tensor / 2
        parameter_grad = tensor.grad
        assert parameter_grad is not None
        parameter_grad /= 2
        return None

    getattr(parameter, register)(hook)
