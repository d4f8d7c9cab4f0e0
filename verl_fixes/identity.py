"""Which fixes a process runs, in a few words that can be compared with another process's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from verl_fixes.records import Record
from verl_fixes.version import __version__


@dataclass(frozen=True)
class Identity:
    """The plugin's version and the state that each patch has, or will have once its module is imported.

    Read from source files and switches, so two processes with the same verl, the same plugin and the same switches
    have the same identity, whatever each of them has imported so far.
    """

    version: str
    states: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[Record]) -> Identity:
        """The identity of the process whose ``status()`` these are."""
        return cls(__version__, {record.name: str(record.expected) for record in records if not record.plumbing})

    @property
    def digest(self) -> str:
        """A short hash over the names and states of all patches."""
        text = ";".join(f"{name}={self.states[name]}" for name in sorted(self.states))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        states = ", ".join(f"{name} {state}" for name, state in self.states.items())
        return f"verl-fixes {self.version} [{self.digest}]: {states}"

    def encode(self) -> str:
        """One line for an environment variable; :meth:`decode` reads it back."""
        return ";".join([self.version, *(f"{name}={state}" for name, state in self.states.items())])

    @classmethod
    def decode(cls, text: str) -> Identity:
        """Read what :meth:`encode` wrote.

        Raises:
            ValueError: it was written by something else.
        """
        version, *pairs = text.split(";")
        states = dict(pair.split("=", 1) for pair in pairs)
        return cls(version, states)


def _unknown() -> Identity:
    return Identity(__version__)


of_this_process: Callable[[], Identity] = _unknown
"""What this process runs; its activation puts its own answer here."""
