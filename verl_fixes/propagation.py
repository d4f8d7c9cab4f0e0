"""Gets the decisions of this process into every Ray worker that it starts, and checks in the worker that they arrived.

verl's work happens in Ray actors, on nodes that may have been started long before the driver. A fix that lives in the
driver only is worse than none: it looks applied.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from verl_fixes import probe, toggles
from verl_fixes.identity import Identity
from verl_fixes.patch import Patch
from verl_fixes.trees import replace_items

EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
EXTERNAL_PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"
PACKAGE = "verl_fixes"


def with_package(modules: str) -> str:
    """``VERL_USE_EXTERNAL_MODULES`` with verl_fixes in it. verl does not strip the names, so no blanks are added."""
    names = [name for name in modules.split(",") if name]
    return modules if PACKAGE in names else ",".join([*names, PACKAGE])


def excluded_by(environ: Mapping[str, str]) -> str | None:
    """The setting by which the user keeps verl 0.9 and later from loading this plugin; None when there is none.

    Naming verl_fixes in VERL_USE_EXTERNAL_MODULES asks for it all the same.
    """
    policy = environ.get(EXTERNAL_PLUGINS, "auto").strip().lower()  # as verl reads it: empty names no plugin
    names = {name.strip() for name in policy.split(",")}
    if policy == "auto" or PACKAGE in names or PACKAGE in environ.get(EXTERNAL_MODULES, "").split(","):
        return None
    return f"{EXTERNAL_PLUGINS}={environ[EXTERNAL_PLUGINS]}"


def verl_loads_plugins() -> bool:
    """Whether the installed verl looks for plugins by itself: 0.9.0 and later. Before, VERL_USE_EXTERNAL_PLUGINS is
    nobody's variable and keeps nothing out."""
    source = probe.locate("verl")
    return source is not None and source.says("verl", EXTERNAL_PLUGINS)


def worker_environment(
    environ: Mapping[str, str], decided: toggles.Toggles | None, catalog: tuple[Patch, ...], identity: Identity
) -> dict[str, str]:
    """What a worker needs in its environment to do as this process does.

    Args:
        environ: this process's environment.
        decided: this process's decisions, arguments of ``activate()`` included; None when it is not active.
        catalog: the patches that were decided about.
        identity: what this process runs; a worker compares it with its own. A driver's travels on unchanged.

    Returns:
        Empty when the plugin is not active here. When everything is off, only that. When the user keeps verl from
        loading the plugin, only that.
    """
    if decided is None:
        return {}
    driver = {toggles.DRIVER: environ.get(toggles.DRIVER) or identity.encode()}
    if decided.all_off:
        return {toggles.ALL: "0", **driver}
    if excluded_by(environ) and verl_loads_plugins():
        return {EXTERNAL_PLUGINS: environ[EXTERNAL_PLUGINS]}
    return {
        EXTERNAL_MODULES: with_package(environ.get(EXTERNAL_MODULES, "")),
        toggles.ALL: "1",  # a node where everything is off must not stay so without a word
        **{patch.env: str(int(decided.patches[patch.name].enabled)) for patch in catalog},
        **({toggles.STRICT: "1"} if decided.strict else {}),
        **({toggles.LOG: decided.log} if decided.log != "warning" else {}),
        **driver,
    }


def extend_runtime_env(
    runtime_env: Any, additions: Mapping[str, str], inherited: Mapping[str, str] | None = None
) -> Any:
    """A copy of a Ray runtime environment with more ``env_vars``: what is there stays, the list of modules is extended.

    Args:
        runtime_env: a dict, a ``ray.runtime_env.RuntimeEnv`` or None.
        additions: from :func:`worker_environment`; the argument itself comes back when they are empty, or when the
            ``env_vars`` that are there keep verl from loading the plugin.
        inherited: ``env_vars`` that the worker gets anyway, from the job. They stay, too; only what the driver runs is
            told anew, so that a switch which is older than the driver's last decision shows as a difference.
    """
    own = dict((runtime_env or {}).get("env_vars") or {})
    present = {**(inherited or {}), **own}
    if not additions or (excluded_by(present) and verl_loads_plugins()):
        return runtime_env
    env_vars = {**{name: value for name, value in additions.items() if name not in present}, **own}
    if EXTERNAL_MODULES in additions and EXTERNAL_MODULES in present:
        env_vars[EXTERNAL_MODULES] = with_package(present[EXTERNAL_MODULES])
    if toggles.DRIVER in additions:
        env_vars[toggles.DRIVER] = additions[toggles.DRIVER]
    return replace_items({} if runtime_env is None else runtime_env, {"env_vars": env_vars})


def difference(mine: Identity, environ: Mapping[str, str]) -> str | None:
    """How this worker's fixes differ from its driver's, in words with both sides; None when they do not."""
    text = environ.get(toggles.DRIVER)
    if not text:
        return None
    try:
        driver = Identity.decode(text)
    except ValueError:
        return f"{toggles.DRIVER}={text} was written by a version of verl-fixes that {mine.version} cannot read"
    if driver == mine:
        return None
    return f"the driver runs {driver}; this process runs {mine}"


def missing_package(error: BaseException) -> str | None:
    """What to install where, when ``error`` tells of a worker on a node without this package; else None."""
    from verl_fixes.version import __version__

    text = str(error)
    if f"No module named '{PACKAGE}'" not in text:
        return None
    address = re.search(r"\bip[=:]\s*([\w.:]+)", text)
    where = f"the node with IP {address[1]}" if address else "the node named in this error"
    return (
        f"a Ray worker could not import verl_fixes. Run `pip install verl-fixes=={__version__}` on {where}, in the "
        "environment of its Ray workers; `verl-fixes doctor --ray` lists all nodes. "
        "VERL_FIXES_RAY_PROPAGATION=0 leaves the workers alone."
    )


def _nothing() -> Mapping[str, str]:
    return {}


environment_of_this_process: Callable[[], Mapping[str, str]] = _nothing
"""What workers get; the process's activation puts its own answer here."""
