from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.parallel.forward_inputs import call_on_dummy_row, has_no_rows


def test_a_model_that_takes_no_empty_batch_gives_none_of_its_outputs_and_zero_gradients():
    linear = nn.Linear(3, 4)

    def model(x: Tensor, *, attention_mask: Tensor) -> dict[str, Tensor]:
        scores = linear(x).view(len(x), -1, 2) / attention_mask.sum()  # the view has no answer for no rows
        return {"scores": scores, "of all": scores.sum()}

    outputs = call_on_dummy_row(model, [torch.empty(0, 3)], {"attention_mask": torch.empty(0, 5)})
    outputs["scores"].sum().backward()

    assert outputs["scores"].shape == (0, 2, 2)
    assert outputs["of all"].shape == ()
    assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in linear.parameters())


def test_a_mask_given_by_its_place_masks_nothing_either():
    linear = nn.Linear(3, 3)

    def model(x: Tensor, attention_mask: Tensor) -> Tensor:
        return linear(x).view(len(x), -1) / attention_mask.sum()

    outputs = call_on_dummy_row(model, [torch.empty(0, 3), torch.empty(0, 3)], {})
    outputs.sum().backward()

    assert outputs.shape == (0, 3)
    assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in linear.parameters())


def test_only_the_first_tensor_says_whether_there_are_rows():
    assert has_no_rows([], {"x": torch.empty(0, 3), "scale": torch.ones(2)})
    assert not has_no_rows([torch.ones(1, 3), torch.empty(0)], {})
    assert not has_no_rows([torch.tensor(1.0), "text"], {})
