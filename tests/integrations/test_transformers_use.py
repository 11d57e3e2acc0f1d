"""How the Trainer is made and what it refuses; what callbacks see; models with adapters, and in half precision."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy

transformers = pytest.importorskip("transformers")

import lockstep as ls  # noqa: E402
from lockstep.errors import ConfigError, DataError  # noqa: E402
from lockstep.integrations.transformers import Trainer  # noqa: E402
from lockstep.transformers_names import TRAINING_ARGUMENTS  # noqa: E402

TrainingArguments = transformers.TrainingArguments


def make(tiny: Any, folder: Any, *, strategy: Any = None, model: Any = None, **settings: Any) -> Any:
    args = tiny.arguments(str(folder), 2, **settings)
    return Trainer(
        tiny.model() if model is None else model, args, tiny.collate, tiny.rows(9), tiny.rows(5), strategy=strategy
    )


@pytest.mark.slow
def test_the_loss_gets_a_batch_of_the_collator_s_type(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any):
    class Reading(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **settings: Any) -> Any:
            assert type(inputs) is transformers.BatchEncoding
            assert len(inputs.input_ids) == len(inputs.labels)
            return super().compute_loss(model, inputs, return_outputs, **settings)

    def collate(rows: Any) -> Any:
        return transformers.BatchEncoding(tiny.collate(rows))

    trainer = Reading(tiny.model(), tiny.arguments(str(tmp_path), 2), collate, tiny.rows(9), strategy=make_strategy(2))
    trainer.train()


@pytest.mark.slow
def test_the_renamed_argument_of_programs_of_2024_is_named(tiny: Any, tmp_path: Any):
    with pytest.raises(ConfigError, match="write processing_class=tokenizer"):
        Trainer(tiny.model(), tiny.arguments(str(tmp_path), 2), tokenizer=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING_ARGUMENTS)
def test_a_note_says_what_replaces_an_argument_of_transformers_4(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(TypeError) as raised:
        transformers.TrainingArguments(**{name: None})
    sys.excepthook(raised.type, raised.value, raised.tb)

    *_, error, note = capsys.readouterr().err.splitlines()
    assert error == f"TypeError: TrainingArguments.__init__() got an unexpected keyword argument {name!r}"
    assert note == f"{name} is of transformers 4; {TRAINING_ARGUMENTS[name]}"


def with_keywords() -> Any:
    return transformers.TrainingArguments(
        output_dir="out", warmup_ratio=0.1, evaluation_strategy="epoch", no_cuda=True, group_by_length=True
    )


def with_many_keywords() -> Any:
    # By its plain name: a call of more than 15 keywords is compiled in another way than the call of an attribute.
    return TrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        learning_rate=1e-3,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.9,
        adam_epsilon=1e-6,
        max_grad_norm=1.0,
        warmup_ratio=0.1,
        logging_steps=1,
        save_steps=1,
        eval_steps=1,
        seed=1,
        evaluation_strategy="epoch",
        bf16=False,
        fp16=False,
        no_cuda=True,
        report_to="none",
        group_by_length=True,
    )


def with_a_dict() -> Any:
    settings = {"warmup_ratio": 0.1, "no_cuda": True, "group_by_length": True, "output_dir": "out"}
    settings["evaluation_strategy"] = "epoch"
    logging = {"logging_dir": "logs"}
    return transformers.TrainingArguments(**settings), logging


@pytest.mark.slow
@pytest.mark.parametrize("call", [with_keywords, with_many_keywords, with_a_dict])
def test_all_arguments_of_transformers_4_in_a_call_are_answered_at_once(
    call: Callable[[], Any], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(TypeError) as raised:
        call()
    sys.excepthook(raised.type, raised.value, raised.tb)

    *_, error, first, second, third, fourth = capsys.readouterr().err.splitlines()
    assert error.startswith("TypeError: TrainingArguments.__init__() got an unexpected keyword argument ")
    names = ["evaluation_strategy", "no_cuda", "warmup_ratio", "group_by_length"]
    notes = [f"{name} is of transformers 4; {TRAINING_ARGUMENTS[name]}" for name in names]
    assert first.partition(" ")[0] == error.rpartition(" ")[2].strip("'")
    assert sorted([first, second, third, fourth]) == sorted(notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "override", "advice"),
    [
        ("compute_loss", lambda self, model, inputs, return_outputs=False: None, "add num_items_in_batch=None"),
        ("training_step", lambda self, model, inputs: None, "add num_items_in_batch=None"),
        ("training_step", lambda self, model, inputs, **settings: None, "add num_items_in_batch=None"),
        ("log", lambda self, logs: None, "add start_time=None"),
    ],
)
def test_an_override_of_2024_is_refused_before_the_training(
    tiny: Any, tmp_path: Any, method: str, override: Any, advice: str
):
    program = type("Mine", (Trainer,), {method: override})
    with pytest.raises(ConfigError, match=rf"^Mine\.{method}\(.*\) cannot be called .*; {advice}"):
        program(tiny.model(), tiny.arguments(str(tmp_path), 2))


@pytest.mark.slow
def test_an_override_of_today_with_other_names_is_taken(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any):
    class Renamed(Trainer):
        def training_step(self, network: Any, batch: Any, items: Any = None) -> Any:
            return super().training_step(network, batch, items)

        def log(self, *positional: Any) -> None:
            super().log(*positional)

    args = tiny.arguments(str(tmp_path), 2)
    trainer = Renamed(tiny.model(), args, tiny.collate, tiny.rows(4), strategy=make_strategy(2))

    assert trainer.train().global_step > 0


def test_it_takes_the_strategy_given_or_in_scope_or_all_devices(
    tiny: Any, make_strategy: MakeStrategy, split_cpu: Any, tmp_path: Any
):
    given, ambient = make_strategy(2), make_strategy(3)
    assert make(tiny, tmp_path, strategy=given).strategy is given
    with ambient.scope():
        assert make(tiny, tmp_path).strategy is ambient
    with closing(make(tiny, tmp_path).strategy) as chosen:
        assert [device.name for device in chosen.devices] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


@pytest.mark.slow
def test_the_batch_is_per_replica_and_the_process_is_one(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any):
    trainer = make(tiny, tmp_path, strategy=make_strategy(3))
    assert (trainer.args.n_gpu, trainer.args.world_size, trainer.args.train_batch_size) == (3, 1, 6)
    assert len(trainer.get_train_dataloader()) == 2
    assert trainer.accelerator.num_processes == 1
    assert type(trainer).__mro__[1] is transformers.Trainer


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"torch_compile": True}, "torch_compile=True, which draws its random numbers"),
        ({"optim": "lomo"}, "optim='lomo', which updates weights in the backward pass"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["x"]}, "optim='galore_adamw_layerwise', which"),
        ({"debug": "underflow_overflow"}, "debug='underflow_overflow', whose hooks know one copy"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    tiny: Any, make_strategy: MakeStrategy, tmp_path: Any, settings: dict[str, Any], complaint: str
):
    with pytest.raises(ConfigError, match=f"the Trainer of lockstep got {complaint}") as caught:
        make(tiny, tmp_path, strategy=make_strategy(2), **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_what_takes_the_model_apart_is_refused(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any):
    strategy = make_strategy(2)
    for name, value in (("fsdp", "full_shard"), ("deepspeed", "zero.json"), ("parallelism_config", object())):
        args = tiny.arguments(str(tmp_path), 2)
        setattr(args, name, value)  # as it is where the packages that it needs are installed
        with pytest.raises(ConfigError, match=f"the Trainer of lockstep got .*{name}.*use transformers' own"):
            Trainer(tiny.model(), args, strategy=strategy)
    with pytest.raises(ConfigError, match="the Trainer of lockstep got the default strategy of one device, and needs"):
        make(tiny, tmp_path, strategy=ls.get_strategy())
    spread = tiny.model()
    spread.hf_device_map = {"bert": 0, "classifier": "cpu"}
    with pytest.raises(ConfigError, match=r"is spread over 0, cpu by its device_map, .*; load it without"):
        make(tiny, tmp_path, strategy=strategy, model=spread)


@pytest.mark.slow
def test_rows_that_do_not_fit_together_are_named(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any):
    trainer = make(tiny, tmp_path, strategy=make_strategy(2), remove_unused_columns=False)
    trainer.data_collator = lambda rows: tiny.collate(rows) | {"position_ids": torch.arange(3)}
    with pytest.raises(DataError, match=r'of a batch disagree in length: .*batch\["position_ids"\]: 3 rows'):
        trainer.train()


@pytest.mark.slow
def test_lists_of_one_item_per_row_are_divided_too(tiny: Any, make_strategy: MakeStrategy):
    seen: list[tuple[int, list[str]]] = []
    trained: list[int] = []

    def named(base: type) -> type:
        class Named(base):
            def compute_loss(self, model, inputs, **more):
                seen.append((len(inputs["labels"]), inputs.pop("texts")))
                trained.extend([len(inputs["labels"])] * model.training)
                return super().compute_loss(model, inputs, **more)

        return Named

    def collate(rows: list[Any]) -> dict[str, Any]:
        return tiny.collate(rows) | {"texts": [str(row["labels"]) for row in rows]}

    task = tiny.Task(trainer=named, args={"remove_unused_columns": False}, more={"data_collator": collate})
    tiny.train(task, Trainer, replicas=4, strategy=make_strategy(4))

    assert all(rows == len(texts) for rows, texts in seen)
    assert sum(trained) == 21


def weighted(scores: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(scores, labels, weight=torch.tensor([1.0, 9.0]).double())


def summed(scores: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(scores, labels, reduction="sum")


def contrasting(scores: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


def beside_a_part(scores: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    return summed(scores, labels, items) / items + scores.square().mean()


def mean(scores: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(scores, labels) + 0.1 * scores.square().mean()


def part(scores: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    return summed(scores, labels, items) / items


def told_of(loss: Callable[..., torch.Tensor], tiny: Any, strategy: Any, replicas: int) -> list[str]:
    def own(base: type) -> type:
        class Own(base):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                made = loss(outputs.logits, inputs["labels"], num_items_in_batch)
                return (made, outputs) if return_outputs else made

        return Own

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny.train(
            tiny.Task(model=lambda: tiny.model(dropout=0.1), trainer=own), Trainer, replicas=replicas, strategy=strategy
        )
    return [str(each.message) for each in caught if "two parts" in str(each.message)]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [weighted, summed, contrasting, beside_a_part])
def test_a_loss_that_shards_do_not_add_up_to_is_told_once(
    tiny: Any, make_strategy: MakeStrategy, loss: Callable[..., torch.Tensor]
):
    (told,) = told_of(loss, tiny, make_strategy(2), 2)
    assert "num_items_in_batch" in told
    assert "2 replicas" in told
    assert told_of(loss, tiny, make_strategy(1), 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("loss", [mean, part])
def test_a_mean_and_a_part_of_a_sum_are_not_told(
    tiny: Any, make_strategy: MakeStrategy, loss: Callable[..., torch.Tensor]
):
    assert told_of(loss, tiny, make_strategy(2), 2) == []


def averaging(base: type) -> type:
    """A mean over rows of means over labels, as the losses of preference trainers."""

    class Averaging(base):  # type: ignore[misc]
        def compute_loss(self, model, inputs, return_outputs=False, **named):
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            labels = inputs["labels"]
            counts = labels.ne(-100).sum(1).clamp(min=1)
            losses = torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
            loss = (losses.sum(1) / counts).mean()
            return (loss, outputs) if return_outputs else loss

    return Averaging


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_mean_over_rows_of_means_over_labels_is_weighed_by_rows(
    tiny: Any, make_strategy: MakeStrategy, replicas: int
):
    task = tiny.Task(
        model=lambda: tiny.model("TokenClassification", num_labels=5),
        train=tiny.rows(21, "tags", labelled=True),
        valid=tiny.rows(13, "tags", seed=2, labelled=True),
        batch=12,
        trainer=averaging,
        args={"prediction_loss_only": True},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = tiny.train(task, Trainer, replicas=replicas, strategy=make_strategy(replicas))
    tiny.assert_same(ours, tiny.train(task, transformers.Trainer))


@pytest.mark.slow
def test_other_arguments_made_later_do_no_harm(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any):
    trainer = make(tiny, tmp_path, strategy=make_strategy(2), bf16=True)
    tiny.arguments(str(tmp_path), 2)  # makes accelerate forget what it knows
    trainer.train()
    assert trainer.accelerator.mixed_precision == "bf16"
    assert trainer.args.n_gpu == 2


class Watches(transformers.TrainerCallback):
    """Notes what the gradients are before each update, and changes the first."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        if state.global_step == 0:
            for gradient in gradients:
                gradient.mul_(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_see_and_change_the_gradients_of_the_whole_batch(
    tiny: Any, make_strategy: MakeStrategy, layout: str, accumulate: int
):
    watched = [Watches(), Watches()]
    tasks = [
        tiny.Task(more={"callbacks": [each]}, args={"gradient_accumulation_steps": accumulate, "optim": "sgd"})
        for each in watched
    ]

    theirs = tiny.train(tasks[0], transformers.Trainer)
    ours = tiny.train(tasks[1], Trainer, replicas=4, strategy=make_strategy(4))

    assert watched[1].norms == pytest.approx(watched[0].norms, rel=1e-9)
    tiny.assert_same(ours, theirs)


@pytest.mark.slow
def test_a_batch_size_that_fits_is_found(tiny: Any, make_strategy: MakeStrategy):
    """The model runs out of memory with more than two rows on a replica; the batch is halved."""

    def hungry(base: type) -> type:
        class Hungry(base):
            def compute_loss(self, model, inputs, **named):
                if len(inputs["labels"]) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return super().compute_loss(model, inputs, **named)

        return Hungry

    task = tiny.Task(trainer=hungry, args={"auto_find_batch_size": True}, batch=6)

    ours = tiny.train(task, Trainer, replicas=2, strategy=make_strategy(2))

    assert ours.trainer.state.train_batch_size == 4
    assert ours.trainer.state.global_step == 6


@pytest.mark.slow
def test_adapters_are_trained_alone_and_saved_alone(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any):
    peft = pytest.importorskip("peft")

    def model() -> Any:
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.0)
        torch.manual_seed(0)
        return peft.get_peft_model(tiny.model(), lora).double()

    task = tiny.Task(model=model, args={"save_strategy": "epoch", "label_smoothing_factor": 0.1})
    theirs = tiny.train(task, transformers.Trainer, folder=str(tmp_path / "theirs"))
    ours = tiny.train(task, Trainer, replicas=4, strategy=make_strategy(4), folder=str(tmp_path / "ours"))

    tiny.assert_same(ours, theirs)
    files = [sorted(f.name for f in (tmp_path / who / "checkpoint-3").iterdir()) for who in ("ours", "theirs")]
    assert set(files[0]) - set(files[1]) == {
        "lockstep_conditions.json",
        "lockstep_data_state.pth",
        "lockstep_rng_state.pth",
    }
    assert "adapter_model.safetensors" in files[0]


@pytest.mark.slow
def test_bf16_is_near_one_device_and_the_model_stays_in_float32(tiny: Any, make_strategy: MakeStrategy):
    task = tiny.Task(model=lambda: tiny.model().float(), args={"bf16": True, "eval_strategy": "epoch"})
    theirs = tiny.train(task, transformers.Trainer)
    ours = tiny.train(task, Trainer, replicas=4, strategy=make_strategy(4))
    tiny.assert_same(ours, theirs, far=2e-2)
    assert {parameter.dtype for parameter in ours.trainer.model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_second_training_goes_on_with_the_optimizer(tiny: Any, make_strategy: MakeStrategy, layout: str):
    both = []
    for base, replicas, more in ((transformers.Trainer, 1, {}), (Trainer, 2, {"strategy": make_strategy(2)})):
        trainer = tiny.train(tiny.Task(), base, replicas=replicas, **more).trainer
        trainer.train()
        both.append(tiny.outcome(trainer))
    tiny.assert_same(both[1], both[0])


@pytest.mark.slow
def test_a_batch_norm_passes_a_shard_of_one_row(make_strategy: MakeStrategy, tiny: Any, tmp_path: Any):
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.last(self.norm(x))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": torch.randn(3), "labels": number % 2} for number in range(7)]
    args = tiny.arguments(str(tmp_path), 2, save_strategy="epoch")
    strategy = make_strategy(2)
    trainer = Trainer(Normed(), args, train_dataset=data, strategy=strategy)

    trainer.train()

    assert float(trainer.model.norm.running_mean.abs().sum()) > 0
    averaged = strategy.mirrored_modules[0].state_dict()["norm.running_mean"]
    torch.testing.assert_close(trainer.model.norm.running_mean, averaged, rtol=0, atol=0)


class TakesNoEmptyBatch(torch.nn.Module):
    """As attention layers do that reshape by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = torch.nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if not len(x):
            raise RuntimeError("cannot reshape tensor of 0 elements")
        logits = self.last(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_without_rows_no_forward_pass_runs_and_the_numbers_are_those_of_one_device(
    make_strategy: MakeStrategy, tiny: Any, tmp_path: Any
):
    random = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(3, dtype=torch.float64, generator=random), "labels": n % 2} for n in range(10)]

    def outcome(base: type, per_device: int, **named: Any) -> tuple[Any, float, Any]:
        args = tiny.arguments(str(tmp_path), per_device, num_train_epochs=2, learning_rate=0.1)
        trainer = base(TakesNoEmptyBatch(), args, train_dataset=data, eval_dataset=data[:9], **named)
        trainer.train()
        return trainer.model.state_dict(), trainer.evaluate()["eval_loss"], trainer.predict(data[:9]).predictions

    expected = outcome(transformers.Trainer, 8)  # batches of 8 and 2 rows, of 8 and 1
    found = outcome(Trainer, 2, strategy=make_strategy(4))

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_the_facade_does_not_import_transformers():
    assert not hasattr(ls, "Trainer")
