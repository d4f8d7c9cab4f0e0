"""plain_numbers on its own: every kind of one-element tensor, bit for bit, and nothing else changed."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tensors.strategies import Pair, nested
from verl_fixes.patches.scalar_metrics import fetch, plain_numbers

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SHAPES = ((), (1,), (1, 1), (1, 1, 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool, torch.complex64], ids=str)
def test_one_element_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.tensor(1.5).to(dtype).reshape(shape)
    (number,) = plain_numbers([tensor])
    kind = bool if dtype is torch.bool else int if dtype in INTS else complex if dtype is torch.complex64 else float
    assert type(number) is kind
    assert number == (1.5 if kind in (float, complex) else 1)


@pytest.mark.parametrize("value", [2**53 + 1, -(2**63), 2**63 - 1])
def test_large_integers_are_exact(value: int) -> None:
    assert plain_numbers({"n": torch.tensor(value)}) == {"n": value}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 1e-45])
def test_special_floats_stay_what_they_are(value: float) -> None:
    number = plain_numbers([torch.tensor(value)])[0]
    assert np.float32(number).tobytes() == np.float32(value).tobytes()


def test_a_tensor_on_the_graph_and_a_parameter() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    result = plain_numbers({"grad_norm": (weight * 2).sum(), "weight": weight})
    assert result == {"grad_norm": 2.0, "weight": 1.0}


def test_larger_tensors_become_detached_cpu_tensors() -> None:
    attached = torch.ones(3, requires_grad=True) * 2
    result = plain_numbers({"histogram": attached, "empty": torch.empty(0)})
    assert not result["histogram"].requires_grad
    assert torch.equal(result["histogram"], attached.detach())
    assert result["empty"].shape == (0,)


def test_odd_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.tensor([4.0])], layout=torch.jagged)
    sparse = torch.tensor([3.0]).to_sparse()
    meta = torch.empty((), device="meta")
    result = plain_numbers([nested, sparse, meta])
    assert result[:2] == [4.0, 3.0]
    assert result[2] is meta


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.float64(1.5), np.int64(3), np.bool_(True)], ids=repr)
def test_numpy_scalars_become_python_numbers(scalar: np.generic) -> None:
    (number,) = plain_numbers((scalar,))
    assert type(number) in (float, int, bool)
    assert number == scalar


leaves = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.integers(),
    st.floats(allow_nan=False),
    st.floats(width=32, allow_nan=False).map(torch.tensor),
    st.integers(-100, 100).map(lambda n: torch.tensor([n])),
    st.booleans().map(torch.tensor),
    st.floats(width=32, allow_nan=False).map(np.float32),
    st.just(np.arange(3)).map(np.copy),
)
trees = st.dictionaries(
    st.text(max_size=3),
    nested(leaves),
    max_size=4,
)


def expected(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: expected(value) for key, value in tree.items()}
    if isinstance(tree, Pair):
        return Pair(*map(expected, tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(expected, tree))
    return tree.item() if isinstance(tree, (torch.Tensor, np.generic)) else tree


def has_tensor(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(has_tensor, tree.values()))
    if isinstance(tree, (list, tuple)):
        return any(map(has_tensor, tree))
    return isinstance(tree, (torch.Tensor, np.generic))


@given(trees)
def test_any_tree_of_metrics(tree: dict[str, Any]) -> None:
    before = repr(tree)
    result = plain_numbers(tree)
    assert repr(result) == repr(expected(tree))
    assert repr(tree) == before
    for key, value in tree.items():
        if not has_tensor(value):
            assert result[key] is value
    pickle.dumps(result)


def test_a_metric_that_appears_twice_is_converted_twice() -> None:
    tensor = torch.tensor(2.0)
    assert plain_numbers({"a": tensor, "b": [tensor, tensor]}) == {"a": 2.0, "b": [2.0, 2.0]}


class Device:
    """A device that is not the CPU, as far as ``fetch`` can tell; the bytes lie in CPU memory."""

    type = "elsewhere"


class Elsewhere(torch.Tensor):
    device = Device()  # type: ignore[assignment]


@given(st.lists(st.sampled_from([*FLOATS, *INTS, torch.bool]), min_size=1, max_size=20))
def test_values_from_another_device_keep_every_bit_of_their_dtype(dtypes: list[torch.dtype]) -> None:
    tensors = [torch.tensor(float(i % 2) + 0.5).to(dtype).reshape(1) for i, dtype in enumerate(dtypes)]
    values = [tensor.item() for tensor in tensors]
    assert fetch([tensor.as_subclass(Elsewhere) for tensor in tensors]) == values
    assert [type(v) for v in fetch([t.as_subclass(Elsewhere) for t in tensors])] == [type(v) for v in values]


def test_input_is_not_changed_by_a_deep_look() -> None:
    tree = {"a": [torch.tensor(1.0), {"b": (torch.ones(2), np.float32(2))}]}
    before = copy.deepcopy(tree)
    plain_numbers(tree)
    assert torch.equal(tree["a"][0], before["a"][0])
    assert isinstance(tree["a"][1]["b"][1], np.float32)
