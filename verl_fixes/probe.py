"""Reads the installed package's source, never imports it, and tells buggy code from fixed, absent or drifted code.

Version numbers cannot judge git checkouts, forks and cherry-picks. A target is first looked up by the fingerprint of
its normalised syntax tree (releases that are tested); other code is judged by a small structural question.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_SKIPPED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_params", "annotation", "returns"})


class Verdict(Enum):
    """What the source says about one target."""

    BUGGY = "buggy"
    INCOMPLETE = "incomplete"
    """Upstream's fix is there, and leaves something that ours completes."""
    FIXED = "fixed"
    ABSENT = "absent"
    DRIFTED = "drifted"


@dataclass(frozen=True)
class Source:
    """The source files of one installed top-level package, read on demand."""

    roots: tuple[Path, ...]

    def file(self, module: str) -> Path | None:
        """The file that defines ``module``, or None when this release has no such module."""
        _, *parts = module.split(".")
        for root in self.roots:
            folder = root.joinpath(*parts)
            files = [folder / "__init__.py"]
            if parts:  # beside the package itself lies nothing of it
                files.insert(0, folder.with_name(f"{folder.name}.py"))
            for file in files:
                if file.is_file():
                    return file
        return None

    def says(self, module: str, word: str) -> bool:
        """Whether a module's source uses ``word``; False where it cannot be read."""
        file = self.file(module)
        try:
            if file is None or word.encode() not in file.read_bytes():
                return False
            return mentions(_parse(file, file.stat().st_mtime_ns), word)
        except (OSError, SyntaxError, ValueError):
            return False

    def function(self, module: str, qualname: str) -> Function | None:
        """The syntax tree of a function or method, or None when the release does not have it."""
        file = self.file(module)
        if file is None:
            return None
        name, _, _ = qualname.partition(".")
        return _find(_definition(file, file.stat().st_mtime_ns, name), qualname)


Question = Callable[[Function, Source], Verdict]
"""Judges a function whose fingerprint is unknown. DRIFTED means: I cannot tell."""


def locate(package: str) -> Source | None:
    """Find an installed top-level package without importing it; None when it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec in sys.modules, as some tests and notebooks make them
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Source(tuple(Path(location) for location in spec.submodule_search_locations))


def judge(
    source: Source, module: str, qualname: str, known: Mapping[str, Verdict], question: Question | None
) -> Verdict:
    """Tell buggy from fixed, absent (no such module) and drifted for one target.

    Raises:
        OSError, SyntaxError: the file is there but cannot be read.
    """
    if source.file(module) is None:
        return Verdict.ABSENT
    if question is None:
        return Verdict.BUGGY
    function = source.function(module, qualname)
    if function is None:
        return Verdict.DRIFTED  # renamed or moved: whether the bug went along cannot be told
    return known.get(fingerprint(function)) or question(function, source)


def fingerprint(node: ast.AST) -> str:
    """A short hash of the code that stays the same across comments, docstrings, type hints and Python versions."""
    return hashlib.sha256(" ".join(_normalised(node)).encode()).hexdigest()[:16]


def _normalised(node: object) -> Iterator[str]:
    if isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            if name in _SKIPPED_FIELDS or value is None or value == []:
                continue
            if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                has_docstring = ast.get_docstring(node, clean=False) is not None
                yield from (name, *_normalised(node.body[has_docstring:]))
            else:
                yield from (name, *_normalised(value))
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _normalised(item)
        yield "]"
    else:
        yield repr(node)


@functools.lru_cache(maxsize=64)
def _parse(file: Path, mtime_ns: int) -> ast.Module:
    return ast.parse(file.read_bytes(), filename=str(file))


@functools.lru_cache(maxsize=256)
def _definition(file: Path, mtime_ns: int, name: str) -> ast.Module:
    """The file as far as it defines ``name``: where that is one undecorated definition, only its lines are parsed."""
    text, start = file.read_bytes(), rb"(?:async def|def|class)[ \t]+" + re.escape(name.encode()) + rb"\b"
    found = re.findall(rb"(?m)^[ \t]*" + start, text)
    if not found:
        return ast.Module([], [])
    alone = re.search(rb"(?ms)^" + start + rb".*?(?=^[^\s#)]|\Z)", text)
    if alone is None or len(found) > 1 or text[: alone.start()].rstrip().rpartition(b"\n")[2].startswith((b"@", b")")):
        return _parse(file, mtime_ns)
    try:
        return ast.parse(alone[0])
    except (SyntaxError, ValueError):  # a string with lines of its own, or the file cannot be read at all
        return _parse(file, mtime_ns)


def _find(tree: ast.Module, qualname: str) -> Function | None:
    body = list(_statements(tree.body))
    *class_names, name = qualname.split(".")
    for class_name in class_names:
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name]
        if not classes:
            return None
        body = list(_statements(classes[-1].body))
    functions = [n for n in body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name]
    return functions[-1] if functions else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of one scope, those under if, try and with included."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for field in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, field, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def mentions(node: ast.AST, word: str) -> bool:
    """Whether the code uses ``word`` as a name, an attribute, an argument or a string."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id == word:
            return True
        if isinstance(inner, ast.Attribute) and inner.attr == word:
            return True
        if isinstance(inner, ast.keyword) and inner.arg == word:
            return True
        if isinstance(inner, ast.Constant) and inner.value == word:
            return True
    return False


def returns(function: Function) -> list[ast.expr]:
    """The values that a function returns, those of functions inside it included."""
    values = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    return [value for value in values if value is not None]


def method_calls(node: ast.AST, method: str) -> Iterator[str | None]:
    """The name at the root of every ``root.….method()`` call, None where the root is no plain name."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == method:
            root: ast.expr = inner.func.value
            while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
                root = root.func if isinstance(root, ast.Call) else root.value
            yield root.id if isinstance(root, ast.Name) else None
