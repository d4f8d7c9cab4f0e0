"""What a patch is: plain data. :mod:`verl_fixes.wrapping` installs and restores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from verl_fixes.probe import Question, Source, Verdict

Wrapper = Callable[..., Any]
"""``wrapper(original, *args, **kwargs)``; for a method, ``args[0]`` is ``self``."""


class State(str, Enum):
    """What is true of a patch, or of one of its targets, in this process."""

    APPLIED = "applied"
    """Installed and read back."""
    REFINED = "refined"
    """Upstream has the fix, ours completes it; installed and read back."""
    PENDING = "pending"
    """The module is not imported yet."""
    UPSTREAM = "upstream"
    """This release has the fix."""
    ABSENT = "absent"
    """This release has no such code."""
    DISABLED = "disabled"
    """Switched off, the reason says by what."""
    DRIFTED = "drifted"
    """The code is there, but it is not one that we know. Left alone."""
    FAILED = "failed"
    """It should have been applied and is not."""

    def __str__(self) -> str:
        return self.value


INSTALLED = (State.APPLIED, State.REFINED)
TROUBLE = (State.DRIFTED, State.FAILED)


@dataclass(frozen=True, eq=False)
class Target:
    """One function of verl (or Megatron) and what to put around it.

    Args:
        module: dotted name of the module that defines it.
        qualname: ``Class.method`` or ``function``.
        wrapper: goes around code that has the bug.
        refine: goes around code that has upstream's fix and leaves something; None: the wrapper does there, too.
        question: tells buggy from fixed by structure, for code whose fingerprint is not in ``known``. None where
            nothing is buggy or fixed, because the wrapper only carries something along; no source is read then.
        known: fingerprints of the releases that are tested, with their verdicts.
        caller: set where ``qualname`` is a name that the module imported, and only this module's use of it is to be
            wrapped: the function that calls it. It is what the question and the fingerprints are about.
        absent: why there is nothing to fix, where a known function is judged ABSENT or ``exists`` says no.
        exists: whether the release has such code at all, for a function that is called differently, or is not there, in
            other releases. None: where the module is, the function must be.
        overrides: whether overrides in subclasses are wrapped as well. False where a wrapper around the method itself
            is enough, because it must not act twice below an override that calls ``super()``.
        unit: targets of one unit go in together or not at all, in an atomic patch.
        on_install: called with the imported module once the wrapper is in place.
    """

    module: str
    qualname: str
    wrapper: Wrapper
    question: Question | None
    refine: Wrapper | None = None
    known: Mapping[str, Verdict] = field(default_factory=dict)
    caller: str | None = None
    absent: str = ""
    exists: Callable[[Source], bool] | None = None
    overrides: bool = True
    unit: str = ""
    on_install: Callable[[ModuleType], None] | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def judged(self) -> str:
        """The function whose code tells buggy from fixed."""
        return self.caller or self.qualname

    def plan(self, verdict: Verdict) -> tuple[State, Wrapper | None]:
        """The state that this target is in once its module is imported, and the wrapper that brings it there."""
        if verdict is Verdict.BUGGY:
            return State.APPLIED, self.wrapper
        if verdict is Verdict.INCOMPLETE:
            return State.REFINED, self.refine or self.wrapper
        return {Verdict.FIXED: State.UPSTREAM, Verdict.ABSENT: State.ABSENT}.get(verdict, State.DRIFTED), None


@dataclass(frozen=True)
class Patch:
    """A fix, as data. README's table, ``status`` and ``explain`` are rendered from these fields.

    Args:
        name: lower case with dashes; the environment variable is derived from it.
        title: what the user gets, in a few words.
        hurts: what goes wrong without it, and who is hit.
        does: what the wrapper does.
        removable: when it can be deleted.
        upstream: links to the upstream pull requests and issues.
        fixed_in: first release of the package that has the whole fix, or "none yet".
        default: whether it is on when no toggle says otherwise.
        targets: the functions that are wrapped.
        atomic: each unit of targets goes in whole or not at all. False only where each target is a fix in its own
            right.
        plumbing: it carries this package's own business and fixes nothing. Not part of what a driver and its workers
            compare.
        always: ``VERL_FIXES=0`` does not switch it off, only its own variable does.
        stacks_on: patches, earlier in the catalog, with which this one may share a target; it wraps theirs.
    """

    name: str
    title: str
    hurts: str
    does: str
    removable: str
    upstream: tuple[str, ...]
    fixed_in: str
    targets: tuple[Target, ...]
    default: bool = True
    atomic: bool = True
    plumbing: bool = False
    always: bool = False
    stacks_on: tuple[str, ...] = ()

    @property
    def env(self) -> str:
        return "VERL_FIXES_" + self.name.upper().replace("-", "_")
