"""The probe reads source, never imports, and is blind to what does not change behaviour."""

from __future__ import annotations

import ast
import sys

import pytest

from tests.unit.conftest import Toy, judge_by_words
from verl_fixes.probe import Verdict, fingerprint, judge, locate, mentions, method_calls

CODE = '''
class Engine:
    @property
    def step(self, batch, *, scale=1):
        """What it does."""
        loss = self.loss(batch) * scale
        return {"loss": loss.detach().item(), "rows": [r for r in batch]}
'''


def parsed(source: str) -> ast.AST:
    tree = ast.parse(source)
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))


@pytest.mark.parametrize(
    "change",
    [
        ('        """What it does."""\n', ""),
        ("loss = ", "# a comment\n        loss = "),
        ("self, batch, *, scale=1", "self, batch: 'Batch', *, scale: float = 1"),
        ("scale=1):", "scale=1) -> dict:"),
        ('"loss"', "'loss'"),
        ("return {", "return {\n            "),
    ],
)
def test_fingerprint_ignores_what_does_not_change_behaviour(change: tuple[str, str]) -> None:
    assert change[0] in CODE
    assert fingerprint(parsed(CODE.replace(*change))) == fingerprint(parsed(CODE))


@pytest.mark.parametrize(
    "change",
    [
        ("* scale", "+ scale"),
        ("scale=1", "scale=2"),
        ('"loss"', '"Loss"'),
        (".detach()", ""),
        ("*, scale", "scale"),
        ("    @property\n", ""),
        ("for r in batch", "for r in batch if r"),
        ("loss = self", "loss = await_ = self"),
    ],
)
def test_fingerprint_sees_what_does(change: tuple[str, str]) -> None:
    assert change[0] in CODE
    assert fingerprint(parsed(CODE.replace(*change))) != fingerprint(parsed(CODE))


def test_fingerprint_is_the_same_on_every_python() -> None:
    assert fingerprint(parsed(CODE)) == "b6168c4aa2642013"


@pytest.mark.parametrize(
    "body, verdict", [("'BUG'", "BUGGY"), ("'HALF'", "INCOMPLETE"), ("'FIX'", "FIXED"), ("1", "DRIFTED")]
)
def test_unknown_code_is_judged_by_the_question(toy: Toy, body: str, verdict: str) -> None:
    module = toy.write("m", f"class C:\n    def f(self):\n        return {body}\n")
    source = locate(toy.name)
    assert source is not None
    assert judge(source, module, "C.f", {}, judge_by_words) is Verdict[verdict]


def test_a_known_fingerprint_wins_over_the_question(toy: Toy) -> None:
    module = toy.write("m", "def f():\n    return 'BUG'\n")
    source = locate(toy.name)
    assert source is not None
    function = source.function(module, "f")
    assert function is not None
    assert judge(source, module, "f", {fingerprint(function): Verdict.FIXED}, judge_by_words) is Verdict.FIXED


@pytest.mark.parametrize("qualname", ["C.g", "D.f", "f", "C.f.g"])
def test_a_module_that_is_there_without_the_code_has_drifted(toy: Toy, qualname: str) -> None:
    module = toy.write("m", "class C:\n    def f(self):\n        return 'BUG'\n")
    source = locate(toy.name)
    assert source is not None
    assert judge(source, module, qualname, {}, judge_by_words) is Verdict.DRIFTED
    assert judge(source, f"{toy.name}.none", "C.f", {}, judge_by_words) is Verdict.ABSENT


@pytest.mark.parametrize("place", ["if True:", "try:", "with open(__file__):", "for _ in ():"])
def test_code_under_a_condition_is_found(toy: Toy, place: str) -> None:
    end = "except ImportError:\n    pass\n" if place == "try:" else ""
    code = "    class C:\n        if 1:\n            def f(self):\n                return 'BUG'\n"
    module = toy.write("m", f"{place}\n{code}{end}")
    source = locate(toy.name)
    assert source is not None
    found = judge(source, module, "C.f", {}, judge_by_words)
    assert found is (Verdict.DRIFTED if place.startswith("for") else Verdict.BUGGY)


def test_nothing_is_imported_and_an_edited_file_is_read_again(toy: Toy) -> None:
    module = toy.write("m", "raise SystemExit('imported')\ndef f():\n    return 'BUG'\n")
    source = locate(toy.name)
    assert source is not None
    assert judge(source, module, "f", {}, judge_by_words) is Verdict.BUGGY
    toy.write("m", "def f():\n    return 'FIX', 'longer'\n")
    assert judge(source, module, "f", {}, judge_by_words) is Verdict.FIXED
    assert module not in sys.modules
    assert toy.name not in sys.modules


def test_a_package_that_is_not_installed_is_not_located() -> None:
    assert locate("no_such_package_anywhere") is None
    assert locate("ast") is None  # a module, not a package


def test_words_and_roots() -> None:
    function = parsed(CODE)
    assert mentions(function, "scale")
    assert mentions(function, "rows")
    assert mentions(function, "detach")
    assert not mentions(function, "row")
    assert list(method_calls(function, "item")) == ["loss"]
    assert list(method_calls(function, "loss")) == ["self"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    return x\n\n\ny = 1\n",
        "@decorated\ndef f(x):\n    return x\n",
        "@decorated(\n    1,\n)\ndef f(x):\n    return x\n",
        "async def f(x):\n    return x",
        "def f(\n    x,\n):\n# a comment in the first column\n    return x\nclass C: ...\n",
        "def f(x):\n    '''Words\nin the first column.\n'''\n    return x\ny = 1\n",
        "def f(x):\n    return [\nx\n]\n",
        "if True:\n    def f(x):\n        return x\n",
        "try:\n    import y\nexcept ImportError:\n    def f(x):\n        return x\n",
        "def f(x):\n    return 0\ndef f(x):\n    return x\n",
        "class C:\n    def f(self): ...\ndef f(x):\n    return x\n",
        "def ff(x): ...\ndef f(x):\n    return x\nclass f2: ...\n",
        "\r\ndef f(x):\r\n    return x\r\ny = 1\r\n",
    ],
)
def test_a_function_is_found_as_in_the_whole_file(toy: Toy, source: str) -> None:
    toy.write("m", source)
    found = locate(toy.name).function(f"{toy.name}.m", "f")  # type: ignore[union-attr]
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    expected = [node for node in functions if node.name == "f" and node.args.args[0].arg == "x"][-1]
    assert found is not None
    assert fingerprint(found) == fingerprint(expected)


def test_a_function_that_is_not_defined_is_not_found(toy: Toy) -> None:
    toy.write("m", "from x import f\ng = f\n# def f(x): ...\n")
    assert locate(toy.name).function(f"{toy.name}.m", "f") is None  # type: ignore[union-attr]


def test_a_file_that_cannot_be_read_is_an_error(toy: Toy) -> None:
    toy.write("m", "def f(x):\n    return (\n\nclass C: ...\n")
    with pytest.raises(SyntaxError):
        locate(toy.name).function(f"{toy.name}.m", "f")  # type: ignore[union-attr]
