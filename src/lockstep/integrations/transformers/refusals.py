"""Arguments that cannot work on replicas are refused, in one line, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import TrainingArguments
from transformers.debug_utils import DebugOption

from lockstep.errors import ConfigError

_UPDATES_IN_BACKWARD = ("lomo", "adalomo")


def check_arguments(args: TrainingArguments, *, workers: int) -> None:
    """Refuses what this Trainer cannot do.

    Args:
        args: transformers' arguments.
        workers: how many workers there are.

    Raises:
        ConfigError: says which argument, and what to do instead.
    """
    for complaint in _complaints(args):
        raise ConfigError(f"the Trainer of lockstep got {complaint}")
    if workers > 1:
        for complaint in _complaints_of_workers(args, workers):
            raise ConfigError(f"the Trainer of lockstep got {complaint}")


def _complaints(args: TrainingArguments) -> Iterator[str]:
    plain = "use transformers' own Trainer for it, or leave it out"
    if args.fsdp:
        yield f"fsdp={args.fsdp!r}, which cuts the model up, and here every replica has all of it; {plain}"
    if args.deepspeed:
        yield f"deepspeed={args.deepspeed!r}, which wants to run the training itself; {plain}"
    if getattr(args, "parallelism_config", None) is not None:
        yield f"a parallelism_config, which divides the model between processes; {plain}"
    if args.torch_compile:
        yield f"torch_compile=True, whose compiled code draws its random numbers past the replicas' own; {plain}"
    name = str(getattr(args.optim, "value", args.optim))
    if name in _UPDATES_IN_BACKWARD or name.endswith("_layerwise"):
        yield (
            f"optim={name!r}, which updates weights in the backward pass, before the replicas' gradients are summed; "
            "choose an optimizer that updates in its step"
        )
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        yield "debug='underflow_overflow', whose hooks know one copy of the model; debug on one device"


def _complaints_of_workers(args: TrainingArguments, workers: int) -> Iterator[str]:
    job = f"in a job of {workers} workers"
    if args.auto_find_batch_size:
        yield f"auto_find_batch_size=True {job}, which would each find their own; find it on the devices of one worker"
    if args.save_on_each_node:
        yield f"save_on_each_node=True {job}, of which the chief alone writes; leave it out"
    if getattr(args, "enable_jit_checkpoint", False):
        yield f"enable_jit_checkpoint=True {job}, which saves when a signal reaches one of them; leave it out"


def check_model(model: Any) -> None:
    """Refuses a model that is spread over devices.

    Raises:
        ConfigError: its parts are on several devices.
    """
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        raise ConfigError(
            f"the model is spread over {', '.join(sorted(places))} by its device_map, and every replica needs all of "
            "it on its own device; load it without device_map"
        )
