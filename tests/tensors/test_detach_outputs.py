"""detach_tree and the wrapper around an engine method, on their own."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tensors.strategies import nested
from verl_fixes.patches.detach_outputs import detach_model_output, detach_tree


def attached(n: float) -> torch.Tensor:
    return torch.full((2,), float(n), requires_grad=True) * 2


leaves = st.one_of(
    st.none(), st.text(max_size=3), st.integers(), st.integers(0, 9).map(attached), st.integers(0, 9).map(torch.tensor)
)
trees = nested(leaves)


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in tensors(item)]
    return [tree] if isinstance(tree, torch.Tensor) else []


@given(trees)
def test_nothing_is_attached_afterwards_and_no_value_changes(tree: Any) -> None:
    before = [(tensor, tensor.requires_grad, tensor.grad_fn) for tensor in tensors(tree)]
    result = detach_tree(tree)
    assert type(result) is type(tree)
    assert repr(result) == repr(tree).replace(", grad_fn=<MulBackward0>", "")
    for new, (old, required, grad_fn) in zip(tensors(result), before, strict=True):
        assert not new.requires_grad
        assert new.grad_fn is None
        assert new.data_ptr() == old.data_ptr()
        assert (new is old) is (not required)
        assert (old.requires_grad, old.grad_fn) == (required, grad_fn)
    if not any(required for _, required, _ in before):
        assert result is tree


def test_jagged_tensors_keep_their_structure() -> None:
    offsets = torch.tensor([0, 2, 5])
    values = torch.randn(5, requires_grad=True)
    nested = torch.nested.nested_tensor_from_jagged(values * 2, offsets)
    result = detach_tree({"log_probs": nested})["log_probs"]
    assert result.is_nested
    assert not result.requires_grad
    assert result.offsets() is nested.offsets()
    assert result.values().data_ptr() == nested.values().data_ptr()
    assert result.shape == nested.shape  # the same symbolic size: the two still combine
    assert torch.equal((result + nested).values(), (2 * nested).values())


def test_a_jagged_tensor_with_holes_keeps_its_lengths() -> None:
    base = torch.randn(2, 6, requires_grad=True) * 1
    holes = torch.nested.narrow(base, 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged)
    result = detach_tree([holes])[0]
    assert not result.requires_grad
    assert [row.tolist() for row in result.unbind()] == [row.tolist() for row in holes.unbind()]


def test_a_leaf_that_requires_grad_is_detached_too() -> None:
    assert not detach_tree([torch.nn.Parameter(torch.ones(1))])[0].requires_grad


def engine(result: Any) -> Any:
    return detach_model_output(lambda self: result, object())


@pytest.mark.parametrize("extra", [(), (torch.tensor(3),)], ids=["2-tuple", "3-tuple"])
def test_the_live_loss_is_the_same_object_and_still_trains(extra: tuple[torch.Tensor, ...]) -> None:
    weight = torch.ones(2, requires_grad=True)
    hidden = weight * 3
    loss = hidden.sum()
    metrics = {"live": hidden}
    output = {"model_output": {"log_probs": hidden, "loss": loss}, "loss": 6.0, "metrics": metrics}
    result = engine((loss, *extra, output))
    assert result[0] is loss
    assert result[1:-1] == extra
    assert loss.requires_grad
    assert not any(tensor.requires_grad for tensor in tensors(result[-1]["model_output"]))
    assert result[-1]["metrics"] is metrics
    assert output["model_output"]["log_probs"] is hidden
    loss.backward()
    assert torch.equal(weight.grad, torch.full((2,), 3.0))


class Step(NamedTuple):
    loss: Any
    output: Any


def test_a_named_result_keeps_its_type() -> None:
    result = engine(Step(attached(1), {"model_output": [attached(1)]}))
    assert type(result) is Step
    assert not result.output["model_output"][0].requires_grad


@pytest.mark.parametrize(
    "result",
    [
        None,
        (),
        (torch.ones(1), lambda output: output),
        (torch.ones(1), {"metrics": {}}),
        (torch.ones(1), {"model_output": None}),
        (torch.ones(1), {"model_output": {}}),
        (torch.ones(1), {"model_output": {"ids": torch.ones(1)}}),
        (torch.ones(1), collections.UserDict({"model_output": 1})),
        {"model_output": attached(1)},
    ],
    ids=range(9),
)
def test_what_holds_nothing_attached_comes_back_as_the_same_object(result: Any) -> None:
    assert engine(result) is result
