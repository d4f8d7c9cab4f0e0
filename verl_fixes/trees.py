"""Maps over the nested containers in which verl keeps metrics and model outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any


def map_tree(change: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``change`` to every leaf of nested mappings, lists and tuples, and copy only what changed.

    Args:
        change: returns the same object for a leaf that stays as it is.
        tree: containers keep their type: dict subclasses, other mutable mappings, lists, tuples, namedtuples.

    Returns:
        ``tree`` itself when no leaf changed; otherwise a tree that shares every unchanged part with it. ``tree`` is
        never mutated. Containers of other types (sets, dataclasses, tensors) are leaves.
    """
    if isinstance(tree, Mapping):
        changed = {key: new for key, old in tree.items() if (new := map_tree(change, old)) is not old}
        return replace_items(tree, changed) if changed else tree
    if isinstance(tree, (list, tuple)):
        items = [map_tree(change, old) for old in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return rebuild(tree, items)
    return change(tree)


def replace_items(tree: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A shallow copy with other values for some keys. Subclasses of dict and other mutable mappings keep their type."""
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return {**tree, **changed}
    new = copy.copy(tree) if isinstance(tree, dict) or not hasattr(tree, "copy") else tree.copy()
    for key, value in changed.items():
        new[key] = value
    return new


def rebuild(tree: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """A list or tuple of the type of ``tree`` (namedtuples too) with other items."""
    if hasattr(tree, "_make"):
        return tree._make(items)
    return type(tree)(items)
