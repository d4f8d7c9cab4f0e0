"""Arguments are found by name, however the call and the signature are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verl_fixes.arguments import Call

UPSTREAM = ("self", "data", "loss", "flag")


def stock(self: int, data: int, loss: int, flag: bool = False, new: int = 7) -> tuple[Any, ...]:
    return self, data, loss, flag, new


def named(self: int, data: int, **kwargs: Any) -> tuple[Any, ...]:
    return stock(self, data, **kwargs)


def anything(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return stock(*args, **kwargs)


def rest(self: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return stock(self, *args, **kwargs)


def renamed(self: int, batch: int, loss_fn: int, flag: bool = False, new: int = 7) -> tuple[Any, ...]:
    return stock(self, batch, loss_fn, flag, new)


def test_an_override_may_call_its_parameters_something_else() -> None:
    for args, kwargs in (((1, 2, 3), {}), ((1, 2), {"loss_fn": 3})):
        call = Call(renamed, UPSTREAM, args, kwargs)
        assert (call["data"], call["loss"], call["flag"]) == (2, 3, False)
        assert call(loss=30, data=20) == (1, 20, 30, False, 7)


CALLS = [((1, 2, 3), {}), ((1, 2), {"loss": 3}), ((1,), {"data": 2, "loss": 3, "new": 9}), ((1, 2, 3, True), {})]


@pytest.mark.parametrize("args, kwargs", CALLS)
@pytest.mark.parametrize("function", [stock, named, anything, rest])
def test_found_and_replaced_by_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if function is named and len(args) > 2:
        return
    call = Call(function, UPSTREAM, args, kwargs)
    assert (call["self"], call["data"], call["loss"]) == (1, 2, 3)
    plain = stock(*args, **kwargs)
    assert call() == plain
    assert call(loss=30) == (1, 2, 30, *plain[3:])
    assert call(data=20, new=5) == (1, 20, 3, plain[3], 5)
    assert call["loss"] == 3


def test_defaults_and_missing_arguments() -> None:
    assert Call(stock, UPSTREAM, (1, 2, 3), {})["flag"] is False
    assert Call(stock, UPSTREAM, (1, 2, 3), {})["new"] == 7
    with pytest.raises(TypeError, match=r"stock\(\) was called without 'loss'"):
        Call(stock, UPSTREAM, (1, 2), {})["loss"]


def test_an_argument_that_may_be_missing() -> None:
    def override(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def full(self: Any, data: Any, forward_only: bool = True) -> Any:
        return forward_only

    upstream = ("self", "data", "forward_only")
    assert Call(override, upstream, (1, 2), {}).get("forward_only") is None
    assert Call(override, upstream, (1, 2, True), {}).get("forward_only") is True
    assert Call(override, upstream, (1, 2), {"forward_only": True}).get("forward_only") is True
    assert Call(full, upstream, (1, 2), {}).get("forward_only") is True
    assert Call(full, upstream, (1, 2), {}).get("nothing", 7) == 7
