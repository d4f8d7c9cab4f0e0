"""A toy package on disk that stands for verl where only the machinery is tested."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from verl_fixes.activation import Activation
from verl_fixes.doctor import Finding
from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Verdict, mentions


class Toy:
    """Writes modules of a package that only this test has, and imports them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder / name
        self._folder.mkdir()
        (self._folder / "__init__.py").touch()

    def write(self, module: str, source: str) -> str:
        (self._folder / f"{module}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return f"{self.name}.{module}"

    def load(self, module: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{module}")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Toy]:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"toy_{abs(hash(request.node.nodeid))}"
    yield Toy(name, tmp_path)
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.fixture(autouse=True)
def _no_toggles(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [v for v in os.environ if v.startswith("VERL_FIXES")]:
        monkeypatch.delenv(variable)


def judge_by_words(function: object, source: object) -> Verdict:
    """``BUG``, ``HALF`` or ``FIX`` as a string in the function's body is its verdict; nothing is drifted."""
    words = (("BUG", Verdict.BUGGY), ("HALF", Verdict.INCOMPLETE), ("FIX", Verdict.FIXED))
    return next((verdict for word, verdict in words if mentions(function, word)), Verdict.DRIFTED)  # type: ignore[arg-type]


def add_one(original: Callable[..., int], *args: object, **kwargs: object) -> int:
    return original(*args, **kwargs) + 1


def make_target(module: str, qualname: str, wrapper: Callable[..., object] = add_one, **more: object) -> Target:
    return Target(module=module, qualname=qualname, wrapper=wrapper, question=judge_by_words, **more)  # type: ignore[arg-type]


def make_patch(*targets: Target, name: str = "add-one", **more: object) -> Patch:
    words = dict.fromkeys(("title", "hurts", "does", "removable", "fixed_in"), "-")
    return Patch(name=name, upstream=("https://github.com/o/r/pull/1",), targets=targets, **{**words, **more})  # type: ignore[arg-type]


@pytest.fixture
def active() -> Iterator[Callable[..., Activation]]:
    """Activations that are taken off again when the test ends."""
    made: list[Activation] = []

    def make(*catalog: Patch, **arguments: object) -> Activation:
        activation = Activation(catalog)
        made.append(activation)
        activation.activate(**arguments)  # type: ignore[arg-type]
        return activation

    yield make
    for activation in reversed(made):
        activation.deactivate()


PLATFORM = """
class PlatformRegistry: ...
@PlatformRegistry.register(platform="{name}")
class Platform: ...
"""


OUTSIDE = ("verl", "torch", "torch_npu", "vllm_ascend", "megatron", "ray")


class Disk:
    """A folder at the head of sys.path, to put packages in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, file: str, text: str = "") -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def verl(self, init: str = "", *, platforms: tuple[str, ...] = (), constants: str = "") -> None:
        self.write("verl/__init__.py", init)
        self.write("verl/version/version", "0.9.9\n")
        self.write("verl/trainer/constants_ppo.py", constants)
        for name in platforms:
            self.write(f"verl/plugin/platform/platform_{name}.py", PLATFORM.format(name=name))

    def distribution(self, name: str, version: str, **files: str) -> None:
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, text in files.items():
            self.write(f"{folder}/{file.replace('__', '.')}", text)

    def torch(self, hip: str | None = None, cuda: str | None = None) -> None:
        self.write("torch/__init__.py", "raise SystemExit('torch was imported')")
        built_for = f"hip: Optional[str] = {hip!r}\ncuda: Optional[str] = {cuda!r}\n"
        self.write("torch/version.py", f"from typing import Optional\n{built_for}__version__ = '2.9'\n")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    for name in [n for n in sys.modules if n.partition(".")[0] in OUTSIDE]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return Disk(tmp_path)


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]
