"""The nested containers in which verl keeps metrics and model outputs, for hypothesis."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st


class Pair(NamedTuple):
    first: Any
    second: Any


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Trees of lists, tuples, dicts and namedtuples with these leaves."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
            st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        ),
        max_leaves=12,
    )
