"""What ``status()`` answers: one record a patch, plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from verl_fixes.patch import Patch, State


@dataclass(frozen=True)
class TargetRecord:
    """One function and what became of it in this process.

    ``expected`` is the state that the target will have once its module is imported, read from its source. It equals
    ``state`` where there is nothing to wait for.
    """

    module: str
    qualname: str
    state: State
    reason: str
    expected: State


@dataclass(frozen=True)
class Record:
    """One patch and what became of it in this process. ``expected`` as in :class:`TargetRecord`."""

    name: str
    title: str
    state: State
    reason: str
    expected: State
    env: str
    default: bool
    plumbing: bool
    upstream: tuple[str, ...]
    fixed_in: str
    targets: tuple[TargetRecord, ...]

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data, ready for JSON."""
        return asdict(self)


_FIRST_WINS = (
    State.FAILED,
    State.DRIFTED,
    State.APPLIED,
    State.REFINED,
    State.PENDING,
    State.UPSTREAM,
    State.DISABLED,
    State.ABSENT,
)


def summarise(patch: Patch, targets: tuple[TargetRecord, ...]) -> Record:
    """Fold the targets of a patch into its record: trouble first, then what is in place, then what is not needed."""
    state = _fold([target.state for target in targets])
    reason = "; ".join(dict.fromkeys(target.reason for target in targets if target.state is state))
    return Record(
        name=patch.name,
        title=patch.title,
        state=state,
        reason=reason,
        expected=_fold([target.expected for target in targets]),
        env=patch.env,
        default=patch.default,
        plumbing=patch.plumbing,
        upstream=patch.upstream,
        fixed_in=patch.fixed_in,
        targets=targets,
    )


def _fold(states: list[State]) -> State:
    return next(state for state in _FIRST_WINS if state in states)
