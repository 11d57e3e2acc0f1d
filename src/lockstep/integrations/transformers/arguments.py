"""What a Trainer is given: which strategy it uses, the arguments it refuses, and what transformers sees of the devices.

transformers and accelerate see one process with one device. ``n_gpu`` is the number of all replicas, so that
``train_batch_size`` is the global batch. ``process_index`` is the worker's, so that only the chief logs and saves.
accelerate sees no distribution; otherwise it would shard, gather and wrap by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import transformers
from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from transformers import TrainingArguments
from transformers.debug_utils import DebugOption

from lockstep.cluster.environment import declared_job
from lockstep.config import list_logical_devices
from lockstep.errors import ConfigError
from lockstep.strategies.base import Strategy, current_strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy

_REFUSED = {
    "fsdp": "cuts the model up, and here every replica has all of it",
    "deepspeed": "wants to run the training itself",
    "parallelism_config": "divides the model between processes",
    "torch_compile": "draws its random numbers past the replicas' own",
}
_REFUSED_OF_WORKERS = {
    "save_on_each_node": "has all workers write, and here the chief alone does",
    "enable_jit_checkpoint": "saves when a signal reaches one of several workers",
}
_RENAMED = {"max_seq_length": "max_length"}  # of TRL
_LOSS_TYPES_OF_BATCHES = {
    "aot": "compares the sorted pairs of a batch",
    "aot_unpaired": "compares the sorted answers of a batch",
    "sft": "averages the tokens of a batch, beside means over its rows",
    "bnpo": "averages the tokens of a batch",
}
"""Values of ``loss_type`` in DPOConfig and GRPOConfig of TRL 1.16."""
_BATCH_SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size")
_UPDATES_IN_BACKWARD = ("lomo", "adalomo")
_CALLS = (
    ("compute_loss", ("model", "inputs"), ("num_items_in_batch",)),
    ("training_step", ("model", "inputs", "num_items_in_batch"), ()),
    ("log", ("logs", "start_time"), ()),
)
"""Methods that programs override, and the positional and keyword arguments that transformers calls them with. The last
argument of each came with 4.46 or 4.47, so overrides of 2024 lack it.
"""


def check_arguments(args: TrainingArguments, *, workers: int, replicas: int) -> None:
    """Raises a ConfigError that names the first argument that does not work on so many replicas and workers."""
    loss_types = getattr(args, "loss_type", None) or ()
    for name in [loss_types] if isinstance(loss_types, str) else loss_types:
        if replicas > 1 and name in _LOSS_TYPES_OF_BATCHES:
            raise ConfigError(
                f"the Trainer of lockstep got loss_type={name!r}, which {_LOSS_TYPES_OF_BATCHES[name]}, and a replica "
                "has some of them: its numbers would be those of smaller batches; choose another loss_type (of GRPO "
                "'dapo', of DPO 'sigmoid'), or use one replica"
            )
    for name, why in (_REFUSED | (_REFUSED_OF_WORKERS if workers > 1 else {})).items():
        if value := getattr(args, name, None):
            raise ConfigError(
                f"the Trainer of lockstep got {name}={value!r}, which {why}; leave it out, or use transformers' own"
            )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in _UPDATES_IN_BACKWARD or optim.endswith("_layerwise"):
        raise ConfigError(
            f"the Trainer of lockstep got optim={optim!r}, which updates weights in the backward pass, before the "
            "replicas' gradients are summed; choose an optimizer that updates in its step"
        )
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        raise ConfigError(
            "the Trainer of lockstep got debug='underflow_overflow', whose hooks know one copy of the model; debug on "
            "one device"
        )


def arguments_in(positional: Sequence[Any], named: Mapping[str, Any]) -> TrainingArguments | None:
    """The TrainingArguments among the arguments of a Trainer, by name or at any place; None if there are none."""
    # By type: DPOTrainer(model, ref_model, args), GRPOTrainer(model, reward_funcs, args).
    candidates = (named.get("args"), *positional)
    return next((value for value in candidates if isinstance(value, TrainingArguments)), None)


def signature_with_strategy(trainer_class: type[transformers.Trainer]) -> inspect.Signature:
    """The signature of a class of Trainers, with ``strategy=`` as its last parameter."""
    parameters = list(inspect.signature(trainer_class).parameters.values())
    named = [parameter for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    strategy = inspect.Parameter("strategy", inspect.Parameter.KEYWORD_ONLY, default=None)
    return inspect.Signature([*named, strategy, *parameters[len(named) :]])


def check_program(
    trainer: transformers.Trainer,
    signature: inspect.Signature,
    names: Collection[str],
    args: TrainingArguments | None,
) -> None:
    """Raises a ConfigError about what transformers 5 no longer calls as a program written for transformers 4 expects.

    Args:
        trainer: its class may override methods of transformers' Trainer.
        signature: that of the constructor which gets the arguments.
        names: of the keyword arguments that it got.
        args: its TrainingArguments.
    """
    accepted = signature.parameters.values()
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted)
    for name in () if open_ended else [name for name in names if name not in signature.parameters]:
        if name == "tokenizer":
            advice = "is called processing_class since transformers 5; write processing_class=tokenizer"
        elif args is not None and hasattr(args, _RENAMED.get(name, name)):
            advice = f"is an argument of {type(args).__name__}; write it there, as {_RENAMED.get(name, name)}="
        else:
            continue  # Python names it
        raise ConfigError(f"the Trainer of lockstep got {name}=, which {advice}")
    for method, positional, keywords in _CALLS:
        # Not that of a wrapped function: the wrapper is what transformers calls.
        override = inspect.signature(getattr(trainer, method), follow_wrapped=False)
        try:
            override.bind(*positional, **dict.fromkeys(keywords))
        except TypeError:
            raise ConfigError(
                f"{type(trainer).__name__}.{method}{override} cannot be called as transformers 5 does, with "
                f"{', '.join(positional + keywords)}; add {(positional + keywords)[-1]}=None as its last parameter"
            ) from None


def check_model(model: Any) -> None:
    """Raises a ConfigError if the parts of a model are on several devices."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        raise ConfigError(
            f"the model is spread over {', '.join(sorted(places))} by its device_map, and every replica needs all of "
            "it on its own device; load it without device_map"
        )


def chosen_strategy(strategy: Strategy | None, *, on_cpu: bool) -> Strategy:
    """The given strategy, else the one in scope, else one over all local devices or over the whole job.

    Raises a ConfigError if the strategy does not give every replica the whole model.
    """
    strategy = strategy or current_strategy()
    if strategy is None and declared_job() is not None:
        return _strategy_of_job(on_cpu)
    if strategy is None:
        return MirroredStrategy(list_logical_devices("CPU") if on_cpu else None)
    if not isinstance(strategy, (MirroredStrategy, MultiWorkerMirroredStrategy)):
        raise ConfigError(
            f"the Trainer of lockstep got {strategy!r}, and needs replicas that have the whole model; give a "
            "MirroredStrategy or a MultiWorkerMirroredStrategy"
        )
    return strategy


@cache
def _strategy_of_job(on_cpu: bool) -> Strategy:
    """One strategy for all Trainers of this process, as a job is joined once."""
    return MultiWorkerMirroredStrategy(list_logical_devices("CPU") if on_cpu else None)


class OneProcess:
    """Makes a Trainer's ``args``, and accelerate's state here, show a strategy as one process with one device."""

    def __init__(self, args: TrainingArguments, strategy: Strategy) -> None:
        self._args = args
        self._replicas = strategy.num_replicas_in_sync
        self._index = strategy.workers.index
        self._device = strategy.devices[0].torch_device
        self._accelerator: dict[str, Any] = {}
        self._is_wide = False
        args.n_gpu  # noqa: B018  the first access sets everything up, which must not happen later
        scale_generation_batch(args, self._replicas)
        self.establish()

    def establish(self) -> None:
        """Sets the state, or sets it again: making other TrainingArguments resets it from the environment."""
        self._args._n_gpu = 1 if self._is_wide else self._replicas
        self._args.__dict__["_setup_devices"] = self._device
        state = object.__new__(PartialState)  # one that does not share accelerate's global state
        state.__dict__ = _state(self._device, index=self._index)
        self._args.distributed_state = state
        if not self._is_known():
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState._shared_state.update(_state(self._device, index=0))
            AcceleratorState._shared_state.update(self._accelerator)

    @contextmanager
    def as_wide_device(self) -> Iterator[None]:
        """A block in which ``args`` show one device, whose batches are those of all replicas.

        For the constructor and methods that prepare data: TRL refuses several GPUs, and KTO pairs completions within
        batches of per_device_train_batch_size.
        """
        if self._is_wide:
            yield
            return
        self.widen()
        try:
            yield
        finally:
            self.narrow()

    def widen(self) -> None:
        """Begins such a block."""
        self._is_wide = True
        self._args._n_gpu = 1
        for name in _BATCH_SIZES:
            setattr(self._args, name, getattr(self._args, name) * self._replicas)

    def narrow(self) -> None:
        """Ends it."""
        self._is_wide = False
        self._args._n_gpu = self._replicas
        for name in _BATCH_SIZES:
            setattr(self._args, name, getattr(self._args, name) // self._replicas)

    def keep(self) -> None:
        """Keeps accelerate's state once there is an Accelerator."""
        self._accelerator = dict(AcceleratorState._shared_state)

    def _is_known(self) -> bool:
        process, accelerator = PartialState._shared_state, AcceleratorState._shared_state
        alone = process.get("distributed_type") is DistributedType.NO and process.get("device") == self._device
        return alone and (not self._accelerator or accelerator.keys() == self._accelerator.keys())


def scale_generation_batch(args: TrainingArguments, replicas: int) -> None:
    """Has GRPO generate for the batches of all replicas: its arguments count those of one process."""
    config: Any = args
    steps = getattr(config, "steps_per_generation", None)
    if steps and config.generation_batch_size == config.per_device_train_batch_size * steps:
        config.generation_batch_size *= replicas


def seen_as_one_device(args: TrainingArguments) -> AbstractContextManager[None]:
    """Sets ``n_gpu`` to 1 for the block: for code of transformers about one replica or about the whole batch."""
    return _with_attribute(args, "_n_gpu", 1)


def seen_as_chief(args: TrainingArguments) -> AbstractContextManager[None]:
    """Sets ``process_index`` to 0 for the block: for what every worker must do with the same random numbers."""
    return _with_attribute(args.distributed_state, "process_index", 0)


@contextmanager
def _with_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _state(device: Any, *, index: int) -> dict[str, Any]:
    return {
        "_cpu": device.type == "cpu",
        "backend": None,
        "debug": False,
        "device": device,
        "distributed_type": DistributedType.NO,
        "fork_launched": False,
        "local_process_index": index,
        "num_processes": 1,
        "process_index": index,
    }
