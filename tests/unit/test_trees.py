"""map_tree copies only what changed, keeps types, and mutates nothing."""

from __future__ import annotations

import collections
import copy
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_fixes.trees import map_tree


class Pair(NamedTuple):
    first: Any
    second: Any


class Marked(int):
    """A leaf that is to be replaced."""


leaves = (
    st.none() | st.text(max_size=3) | st.floats(allow_nan=False) | st.integers().map(Marked) | st.binary(max_size=2)
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=4),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.dictionaries(st.text(max_size=2), inner, max_size=4).map(collections.OrderedDict),
    ),
    max_leaves=20,
)


def replace(leaf: Any) -> Any:
    return f"<{int(leaf)}>" if isinstance(leaf, Marked) else leaf


def reference(tree: Any) -> Any:
    if isinstance(tree, dict):
        return type(tree)((key, reference(value)) for key, value in tree.items())
    if isinstance(tree, Pair):
        return Pair(*(reference(value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(reference(value) for value in tree)
    return replace(tree)


def has_marked(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(has_marked, tree.values()))
    if isinstance(tree, (list, tuple)):
        return any(map(has_marked, tree))
    return isinstance(tree, Marked)


@given(trees)
def test_every_leaf_is_replaced_and_types_and_order_stay(tree: Any) -> None:
    before = copy.deepcopy(tree)
    result = map_tree(replace, tree)
    assert result == reference(tree)
    assert repr(result) == repr(reference(tree))
    assert tree == before


@given(trees)
def test_what_holds_nothing_to_change_is_the_same_object(tree: Any) -> None:
    def check(old: Any, new: Any) -> None:
        if not has_marked(old):
            assert new is old
        elif isinstance(old, dict):
            for key in old:
                check(old[key], new[key])
        elif isinstance(old, (list, tuple)):
            for pair in zip(old, new, strict=True):
                check(*pair)

    check(tree, map_tree(replace, tree))


def test_other_mappings_keep_their_type_where_they_can() -> None:
    default = collections.defaultdict(list, a=Marked(1))
    result = map_tree(replace, default)
    assert type(result) is collections.defaultdict
    assert result == {"a": "<1>"}
    assert default["a"] == 1
    assert map_tree(replace, MappingProxyType({"a": Marked(1)})) == {"a": "<1>"}

    class Attributes(dict[str, Any]):
        note = ""

    own = Attributes(a=Marked(1))
    own.note = "kept"
    changed = map_tree(replace, own)
    assert (type(changed), changed, changed.note, own) == (Attributes, {"a": "<1>"}, "kept", {"a": 1})


@pytest.mark.parametrize("leaf", [{Marked(1)}, "text", b"bytes", range(3), object()], ids=repr)
def test_other_containers_are_leaves(leaf: Any) -> None:
    assert map_tree(replace, leaf) is leaf
