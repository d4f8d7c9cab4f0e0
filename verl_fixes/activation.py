"""Per process: decide, hook, probe, apply, roll back.

A file is read when the module that it defines is imported, and when the process has to say what it runs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType

from verl_fixes import identity, import_hooks, probe, propagation, toggles, wrapping
from verl_fixes.catalog import CATALOG, check
from verl_fixes.errors import InstallError, RestoreError, StrictError
from verl_fixes.patch import INSTALLED, TROUBLE, Patch, State, Target, Wrapper
from verl_fixes.records import Record, TargetRecord, summarise
from verl_fixes.stderr import say


class Activation:
    """The patches of one process. The package has one of these; tests make their own with a small catalog."""

    def __init__(self, catalog: Sequence[Patch]) -> None:
        self._catalog = tuple(catalog)
        self._lock = threading.RLock()
        self._active = False
        self._toggles: toggles.Toggles | None = None
        self._hooked: set[str] = set()
        self._modules: dict[str, ModuleType] = {}
        self._outcomes: dict[Target, TargetRecord] = {}
        self._blocked: str | None = None
        self._identity: identity.Identity | None = None

    def activate(
        self,
        *,
        enable: Iterable[str] = (),
        disable: Iterable[str] = (),
        strict: bool | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> list[Record]:
        """Apply every patch that is on, now or when its module is imported. Idempotent, from any thread.

        Args:
            enable, disable: names of patches; the environment wins over both.
            strict: a drifted or failed patch is an error; VERL_FIXES_STRICT wins.
            environ: instead of ``os.environ``.

        Raises:
            ToggleError: an unknown patch, variable or value.
            CatalogError: two patches that claim one target.
            StrictError: in strict mode, a patch is drifted or failed.
            RestoreError: a patch is to be switched off and somebody has wrapped on top of it.
        """
        self.start(enable=enable, disable=disable, strict=strict, environ=environ)
        return self.status()

    def start(
        self,
        *,
        enable: Iterable[str] = (),
        disable: Iterable[str] = (),
        strict: bool | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """As :meth:`activate`, without an answer: reads no file of a module that is not imported."""
        check(self._catalog)
        environment = os.environ if environ is None else environ
        decided = toggles.read(environment, self._catalog, enable=enable, disable=disable, strict=strict)
        with self._lock:
            if self._active and decided != self._toggles:
                self._restore_all()
            if decided != self._toggles:
                self._identity = None
            self._toggles, self._active, self._blocked = decided, True, None
            wrapping.on_uncovered = self._report_uncovered
            modules = dict.fromkeys(
                t.module for p in self._catalog for t in p.targets if decided.patches[p.name].enabled
            )
            new = [module for module in modules if module not in self._hooked]
            self._hooked.update(new)
        for module in new:  # outside the lock: wrapt takes its own lock, and a hook takes ours
            if not import_hooks.is_imported(module):
                import_hooks.when_imported(module, self._on_import)
        self._sweep()
        with self._lock:
            self._stop_if_strict()

    def identity(self) -> identity.Identity:
        """What this process runs, for comparison with other processes. Kept until something changes."""
        with self._lock:
            if self._identity is None:
                self._identity = identity.Identity.of(self.status())
            return self._identity

    def worker_environment(self) -> Mapping[str, str]:
        """What a Ray worker needs in its environment to do as this process does."""
        excluded = propagation.excluded_by(os.environ)
        if excluded and self._toggles is not None and not self._toggles.all_off and propagation.verl_loads_plugins():
            say(f"Ray workers are left alone: {excluded} does not name verl_fixes. Add it there to reach them.")
        return propagation.worker_environment(os.environ, self._toggles, self._catalog, self.identity())

    def compare_with_driver(self, environ: Mapping[str, str]) -> None:
        """In a Ray worker: say so when it does not run what its driver runs.

        Raises:
            StrictError: they differ, in strict mode.
        """
        if toggles.DRIVER not in environ or self._toggles is None:
            return
        if different := propagation.difference(self.identity(), environ):
            message = (
                f"this Ray worker and its driver do not run the same fixes: {different}. Install the same verl and "
                "verl-fixes on every node; `verl-fixes doctor --ray` shows which differ."
            )
            say(message)
            if self._toggles.strict:
                raise StrictError(f"{message} {toggles.STRICT}=1 stops here.")

    def deactivate(self) -> list[Record]:
        """Put every original object back and leave later imports alone. The identical objects, not equal ones.

        Raises:
            RestoreError: somebody has wrapped one of our functions; the other patches are restored all the same.
        """
        with self._lock:
            self._active, self._toggles, self._blocked, self._identity = False, None, None, None
            self._restore_all()
        return self.status()

    def block(self, error: Exception) -> None:
        """Record an error that kept the whole package from being activated: nothing applied, all is ``failed``."""
        with self._lock:
            self._active, self._toggles, self._identity = False, None, None
            self._blocked = f"{type(error).__name__}: {error}"
            try:
                self._restore_all()
            except RestoreError as refused:
                self._blocked += f"; still in place: {refused}"

    def refuse_imports(self, error: Exception) -> None:
        """Fail the import of every target module with ``error``, until somebody activates after all.

        For strict mode: verl 0.9 swallows what a plugin raises, so raising at activation alone would go unseen.
        """

        def refuse(module: ModuleType) -> None:
            if self._blocked is not None:
                raise error

        for name in dict.fromkeys(target.module for patch in self._catalog for target in patch.targets):
            if not import_hooks.is_imported(name):
                import_hooks.when_imported(name, refuse)

    def status(self) -> list[Record]:
        """What is true now, patch by patch. Reads source files for modules that are not imported; imports nothing."""
        self._sweep()
        with self._lock:
            return [self._summary(patch) for patch in self._catalog]

    def _on_import(self, module: ModuleType) -> None:
        name = module.__name__
        with self._lock:
            if not self._active:
                return
            try:
                self._apply_module(name, module)
            except Exception as error:
                for patch, target in self._targets_in(name):
                    self._outcomes[target] = outcome = _record(target, State.FAILED, f"{type(error).__name__}: {error}")
                    self._take_out(patch, target, outcome)
            self._stop_if_strict(name)

    def _sweep(self) -> None:
        """Apply to whatever is imported by now: modules that were there first, and imports that no hook could see."""
        with self._lock:
            if self._active:
                for name in sorted(self._hooked):
                    module = import_hooks.is_imported(name)
                    if module is not None:
                        self._apply_module(name, module)

    def _targets_in(self, module_name: str) -> Iterator[tuple[Patch, Target]]:
        for patch in self._catalog:
            for target in patch.targets:
                if target.module == module_name:
                    yield patch, target

    def _apply_module(self, name: str, module: ModuleType) -> None:
        again = self._modules.get(name) is not module  # new, or imported again, for example after a failed import
        self._modules[name] = module
        for patch, target in self._targets_in(name):
            outcome = self._outcomes.get(target)
            installed = outcome is not None and outcome.state in INSTALLED
            if again or (installed and not wrapping.lives_in(patch.name, target, module)):  # reloaded
                self._outcomes.pop(target, None)
                wrapping.forget(patch.name, target)
        for patch, target in self._targets_in(name):
            if target not in self._outcomes and self._decision(patch).enabled:
                self._outcomes[target] = outcome = self._apply(patch, target, module)
                self._identity = None
                self._log(patch, outcome)
                if outcome.state in TROUBLE:
                    self._take_out(patch, target, outcome)

    def _apply(self, patch: Patch, target: Target, module: ModuleType) -> TargetRecord:
        if patch.atomic:
            for other in _same_unit(patch, target):
                outcome = self._outcomes.get(other)
                if outcome is not None and outcome.state in TROUBLE:
                    return _record(target, outcome.state, f"left out with the rest of {patch.name}: {outcome.reason}")
        state, reason, wrapper = _examine(patch, target)
        if wrapper is not None:
            try:
                wrapping.install(patch, target, wrapper, module)
            except (InstallError, RestoreError) as error:
                return _record(target, State.FAILED, str(error))
        return _record(target, state, reason)

    def _take_out(self, patch: Patch, troubled: Target, trouble: TargetRecord) -> None:
        """Roll a unit of an atomic patch back as a whole, and say what happened."""
        consequence = "This target is left as it was"
        if patch.atomic:
            unit = _same_unit(patch, troubled)
            consequence = f"The whole {'patch' if len(unit) == len(patch.targets) else 'unit'} is left out"
            for target in unit:
                outcome = self._outcomes.get(target)
                if outcome is None or outcome.state in TROUBLE:
                    continue
                try:
                    wrapping.restore(patch.name, target)
                except RestoreError as error:
                    self._outcomes[target] = _record(target, State.FAILED, str(error))
                    consequence = f"It could not be taken out completely: {error}"
                else:
                    reason = f"taken out with the rest of {patch.name}: {trouble.reason}"
                    self._outcomes[target] = _record(target, trouble.state, reason)
        say(
            f"{patch.name} is {trouble.state}: {trouble.module}:{trouble.qualname}: {trouble.reason}. {consequence}. "
            f"Run `verl-fixes explain {patch.name}`; {patch.env}=0 silences this."
        )

    def _stop_if_strict(self, module_name: str | None = None) -> None:
        if self._toggles is None or not self._toggles.strict:
            return
        for patch in self._catalog:
            for target in patch.targets:
                outcome = self._outcomes.get(target)
                if outcome is None or outcome.state not in TROUBLE or module_name not in (None, target.module):
                    continue
                raise StrictError(
                    f"{patch.name} is {outcome.state} on {target}: {outcome.reason}. {toggles.STRICT}=1 stops here. "
                    f"Way out: {patch.env}=0 to run without this fix, or {toggles.STRICT}=0 to run with a warning."
                )

    def _decision(self, patch: Patch) -> toggles.Decision:
        if self._toggles is None:
            return toggles.Decision(False, "not active in this process; call verl_fixes.activate()")
        return self._toggles.patches[patch.name]

    def _log(self, patch: Patch, outcome: TargetRecord) -> None:
        level = self._toggles.log if self._toggles else "warning"
        if level == "debug" or (level == "info" and outcome.state in INSTALLED):
            say(f"{patch.name} {outcome.state}: {outcome.module}:{outcome.qualname} ({outcome.reason})")

    def _summary(self, patch: Patch) -> Record:
        if self._blocked is not None:
            return summarise(patch, tuple(_record(t, State.FAILED, self._blocked) for t in patch.targets))
        decision = self._decision(patch)
        if not decision.enabled and not any(target in self._outcomes for target in patch.targets):
            return summarise(patch, tuple(_record(t, State.DISABLED, decision.why) for t in patch.targets))
        return summarise(patch, tuple(self._target_record(patch, target) for target in patch.targets))

    def _target_record(self, patch: Patch, target: Target) -> TargetRecord:
        if trouble := wrapping.trouble(patch.name, target):
            return _record(target, State.FAILED, trouble)
        return self._outcomes.get(target) or _forecast(patch, target)

    def _report_uncovered(self, patch: Patch, what: str) -> None:
        say(f"{patch.name} is failed for a class that was made later: {what}. {patch.env}=0 silences this.")
        if self._toggles is not None and self._toggles.strict:
            raise StrictError(f"{patch.name}: {what}. {toggles.STRICT}=1 stops here. Way out: {patch.env}=0.")

    def _restore_all(self) -> None:
        refused = []
        for patch in reversed(self._catalog):
            try:
                wrapping.restore(patch.name)
            except RestoreError as error:
                refused.append(str(error))
            else:
                for target in patch.targets:
                    self._outcomes.pop(target, None)
        if refused:
            raise RestoreError("\n".join(refused))


def _same_unit(patch: Patch, target: Target) -> list[Target]:
    return [other for other in patch.targets if other.unit == target.unit]


def _record(target: Target, state: State, reason: str, expected: State | None = None) -> TargetRecord:
    return TargetRecord(target.module, target.qualname, state, reason, expected or state)


def _examine(patch: Patch, target: Target) -> tuple[State, str, Wrapper | None]:
    """Read the target's source: the state to be in, why, and the wrapper that brings it there."""
    package = target.module.partition(".")[0]
    try:
        source = probe.locate(package)
        if source is None:
            return State.ABSENT, f"{package} is not installed", None
        siblings = [t.module for t in _same_unit(patch, target) if t.module.startswith(f"{package}.")]
        if patch.atomic and len({source.file(module) is None for module in siblings}) > 1:
            return State.DRIFTED, f"this release has only part of the modules that {patch.name} wraps", None
        if target.exists is None or target.exists(source):
            verdict = probe.judge(source, target.module, target.judged, target.known, target.question)
        else:
            verdict = probe.Verdict.ABSENT
    except Exception as error:  # whatever it is, it must not break the import of verl; status shows it
        return State.FAILED, f"its source cannot be judged: {type(error).__name__}: {error}", None
    state, wrapper = target.plan(verdict)
    if state is State.ABSENT and target.absent and source.file(target.module) is not None:
        return state, target.absent, None
    return state, "part of verl-fixes itself" if patch.plumbing and wrapper else _WHY[state], wrapper


def _forecast(patch: Patch, target: Target) -> TargetRecord:
    state, reason, wrapper = _examine(patch, target)
    if wrapper is None:
        return _record(target, state, reason)
    return _record(target, State.PENDING, f"{reason}; its module is not imported yet", expected=state)


_WHY = {
    State.APPLIED: "this release has the bug",
    State.REFINED: "this release has upstream's fix, completed here",
    State.UPSTREAM: "this release has the fix",
    State.ABSENT: "this release has no such code",
    State.DRIFTED: "the code is neither the buggy nor the fixed one that verl-fixes knows",
}


_process = Activation(CATALOG)
propagation.environment_of_this_process = _process.worker_environment
identity.of_this_process = _process.identity
activate = _process.activate
deactivate = _process.deactivate
status = _process.status


def is_own_command_line() -> bool:
    """Whether this process is ``verl-fixes`` or ``python -m verl_fixes``."""
    program = getattr(sys, "argv", [""])[0]
    return os.path.basename(program) == "verl-fixes" or sys.orig_argv[1:3] == ["-m", "verl_fixes"]


def activate_on_import() -> None:
    """What ``import verl_fixes`` does: activate, and never break the program that imports us, unless strict."""
    try:
        _process.start()
        _process.compare_with_driver(os.environ)
        _introduce()
    except Exception as error:
        _process.block(error)
        say(f"nothing is applied in this process: {type(error).__name__}: {error}")
        if toggles.is_strict(os.environ):
            _process.refuse_imports(error)
            raise


def _introduce() -> None:
    """One log line a process: what it runs. INFO on rank 0, DEBUG elsewhere; also on stderr when asked for.

    Where nobody listens, nothing is read to write it.
    """
    is_driver = toggles.DRIVER not in os.environ
    first = os.environ.get("RANK", "0" if is_driver else "") == "0"
    logger, severity = logging.getLogger("verl_fixes"), logging.INFO if first else logging.DEBUG
    level = os.environ.get(toggles.LOG, "").strip().lower()
    wanted = level == "debug" or (level == "info" and first)
    if wanted or logger.isEnabledFor(severity):
        mine = _process.identity()
        logger.log(severity, "%s", mine)
        if wanted:
            say(str(mine))
