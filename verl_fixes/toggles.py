"""Environment variables to decisions: which patches are on, and who said so.

``VERL_FIXES=0`` switches everything off. ``VERL_FIXES_<NAME>=0|1`` decides one patch; 1 also turns on what is off by
default. The environment always wins over the arguments of ``activate()``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl_fixes.errors import ToggleError
from verl_fixes.patch import Patch

ALL = "VERL_FIXES"
STRICT = "VERL_FIXES_STRICT"
LOG = "VERL_FIXES_LOG"
DRIVER = "VERL_FIXES_DRIVER"
"""Set for Ray workers, by the driver: what it runs itself."""
LOG_LEVELS = ("debug", "info", "warning")

_ON = frozenset({"1", "true", "on", "yes"})
_OFF = frozenset({"0", "false", "off", "no"})


@dataclass(frozen=True)
class Decision:
    """Whether a patch is on, and what decided it."""

    enabled: bool
    why: str


@dataclass(frozen=True)
class Toggles:
    """Everything that the environment and the caller decide."""

    patches: Mapping[str, Decision]
    strict: bool
    log: str
    all_off: bool = False


def read(
    environ: Mapping[str, str],
    catalog: Sequence[Patch],
    *,
    enable: Iterable[str] = (),
    disable: Iterable[str] = (),
    strict: bool | None = None,
) -> Toggles:
    """Decide every patch.

    Raises:
        ToggleError: an unknown name or value; the message lists the valid ones and suggests the nearest.
    """
    names = {patch.name for patch in catalog}
    enable, disable = set(enable), set(disable)
    for name in sorted(enable | disable):
        if name not in names:
            raise ToggleError(f"activate() does not know the patch {name!r}.{_nearest(name, names)}")
    if both := sorted(enable & disable):
        raise ToggleError(f"activate() was told to both enable and disable {', '.join(both)}.")

    variables = {patch.env for patch in catalog} | {ALL, STRICT, LOG, DRIVER}
    from_driver = DRIVER in environ  # it may know more patches than we do; that is told as a difference, not as a typo
    for variable in () if from_driver else sorted(environ):
        if (variable == ALL or variable.startswith(ALL + "_")) and variable not in variables:
            raise ToggleError(f"{variable} is no variable of verl-fixes.{_nearest(variable, variables)}")

    everything = _flag(environ, ALL)
    patches = {}
    for patch in catalog:
        own = _flag(environ, patch.env)
        if everything is False and not patch.always:
            decision = Decision(False, f"{ALL}={environ[ALL]}")
        elif own is not None:
            decision = Decision(own, f"{patch.env}={environ[patch.env]}")
        elif patch.name in enable or patch.name in disable:
            decision = Decision(patch.name in enable, "arguments of activate()")
        else:
            off = f"off by default; {patch.env}=1 switches it on"
            decision = Decision(patch.default, "on by default" if patch.default else off)
        patches[patch.name] = decision

    strict_flag = _flag(environ, STRICT)
    log = environ.get(LOG, "").strip().lower() or "warning"
    if log not in LOG_LEVELS:
        raise ToggleError(f"{LOG}={environ[LOG]} is not a level.{_nearest(log, LOG_LEVELS)}")
    strict_now = bool(strict) if strict_flag is None else strict_flag
    return Toggles(patches, strict_now, log, all_off=everything is False)


def is_strict(environ: Mapping[str, str]) -> bool:
    """Whether strict mode is asked for, readable even when other toggles are not."""
    return environ.get(STRICT, "").strip().lower() in _ON


def _flag(environ: Mapping[str, str], variable: str) -> bool | None:
    value = environ.get(variable, "").strip().lower()
    if not value:
        return None
    if value in _ON:
        return True
    if value in _OFF:
        return False
    raise ToggleError(f"{variable}={environ[variable]} is neither 0 nor 1. Set it to 0 (off) or 1 (on), or unset it.")


def _nearest(word: str, valid: Iterable[str]) -> str:
    valid = sorted(valid)
    nearest = difflib.get_close_matches(word, valid, n=1, cutoff=0.6)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    return f"{hint} Valid are: {', '.join(valid)}."
