"""Calls back when a module has been imported, also when its import is under way in this or in another thread.

wrapt fires a hook at once for a module that is in ``sys.modules``, even when it is half initialised and its classes
do not exist yet. Such a module is watched through its spec: ``importlib`` sets ``spec._initializing`` to False when
the import ends, whichever thread ran it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]

_registering = threading.local()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once the module is completely imported; now, when it already is.

    An exception of the callback fails the import, and the next try calls it again. Must not be called under a lock
    that the callback takes: wrapt has a lock of its own.
    """
    import wrapt

    def hook(module: ModuleType) -> None:
        if not getattr(_registering, "active", False):
            _run(module, name, callback)
        elif _is_initialising(module):
            _watch(module, name, callback)
        else:
            callback(module)

    _registering.active = True
    try:
        wrapt.register_post_import_hook(hook, name)
    finally:
        _registering.active = False


def is_imported(name: str) -> ModuleType | None:
    """The module, when it is completely imported."""
    module = sys.modules.get(name)
    return None if module is None or _is_initialising(module) else module


def _is_initialising(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _run(module: ModuleType, name: str, callback: Callback) -> None:
    try:
        callback(module)
    except BaseException:
        # The import fails now. wrapt has dropped the hook, so without this the next try would go through unpatched.
        if sys.modules.get(name) is module:
            del sys.modules[name]
        when_imported(name, callback)
        raise


def _watch(module: ModuleType, name: str, callback: Callback) -> None:
    spec = module.__spec__
    if type(spec) not in (ModuleSpec, _WatchedSpec):
        return  # an exotic loader; status() looks again
    vars(spec).setdefault(_CALLBACKS, []).append(lambda: _after_import(module, name, callback))
    spec.__class__ = _WatchedSpec


def _after_import(module: ModuleType, name: str, callback: Callback) -> None:
    if sys.modules.get(name) is module:
        _run(module, name, callback)
    else:
        when_imported(name, callback)  # this import failed; wait for the next one


_CALLBACKS = "_verl_fixes_callbacks"


class _WatchedSpec(ModuleSpec):
    """A spec that reports the end of its module's import, and is an ordinary spec again afterwards."""

    @property
    def _initializing(self) -> bool:
        return bool(vars(self).get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            for callback in vars(self).pop(_CALLBACKS):
                callback()
