"""Installing and restoring one target: every name by which it is reached, and the identical object afterwards."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.conftest import Toy, add_one, make_patch, make_target
from verl_fixes import wrapping
from verl_fixes.catalog import check
from verl_fixes.errors import CatalogError, InstallError, RestoreError
from verl_fixes.patch import Target


@pytest.fixture
def put() -> Iterator[Callable[[Toy, str, str], Target]]:
    def install(toy: Toy, module: str, qualname: str) -> Target:
        loaded = toy.load(module)
        target = make_target(loaded.__name__, qualname)
        wrapping.install(PATCH, target, add_one, loaded)
        return target

    yield install
    wrapping.restore("p")


PATCH = make_patch(name="p")

CLASSES = '''
class Base:
    """A base."""
    def step(self, x, *, scale=1):
        "Base step."
        return x * scale
    @classmethod
    def make(cls, x):
        return x
    @staticmethod
    def pure(x):
        return x
    async def later(self, x):
        return x
    step.attrs_3141562937 = {"dispatch_mode": 1}
class Child(Base):
    pass
class Override(Base):
    def step(self, x, *, scale=1):
        return 10 * x
class GrandChild(Child):
    def step(self, x, *, scale=1):
        return super().step(x) + 100
'''


def test_a_method_its_heirs_and_its_overrides_are_wrapped(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write("m", CLASSES)
    put(toy, "m", "Base.step")
    m = toy.load("m")
    assert m.Base().step(5) == 6
    assert m.Base().step(5, scale=3) == 16
    assert m.Child().step(5) == 6
    assert m.Override().step(5) == 51
    assert m.GrandChild().step(5) == 107  # the override and, through super(), the base


def test_an_inherited_method_is_added_to_the_child_only(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write("m", CLASSES)
    target = put(toy, "m", "Child.step")
    m = toy.load("m")
    assert (m.Base().step(5), m.Child().step(5), m.GrandChild().step(5)) == (5, 6, 107)
    wrapping.restore("p", target)
    assert "step" not in vars(m.Child)


@pytest.mark.parametrize(
    "qualname", ["Base.step", "Base.make", "Base.pure", "Base.later", "Child.step", "Override.step"]
)
def test_restore_puts_the_identical_object_back(toy: Toy, put: Callable[..., Target], qualname: str) -> None:
    toy.write("m", CLASSES)
    m = toy.load("m")
    before = {cls: dict(vars(cls)) for cls in (m.Base, m.Child, m.Override, m.GrandChild)}
    target = put(toy, "m", qualname)
    assert any(dict(vars(cls)) != before[cls] for cls in before)
    wrapping.restore("p", target)
    for cls, attributes in before.items():
        assert dict(vars(cls)).keys() == attributes.keys()
        assert all(vars(cls)[name] is value for name, value in attributes.items())


def test_class_static_and_async_methods_keep_their_kind(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write("m", CLASSES)
    for name in ("make", "pure", "later"):
        put(toy, "m", f"Base.{name}")
    m = toy.load("m")
    assert m.Base.make(1) == m.Child().make(1) == 2
    assert m.Base.pure(1) == m.Base().pure(1) == 2
    assert inspect.iscoroutinefunction(m.Base.later)

    async def wrapper(original: Callable[..., Any], *args: Any) -> Any:
        return await original(*args) + 1

    wrapping.restore("p")
    wrapping.install(PATCH, make_target(m.__name__, "Base.later"), wrapper, m)
    assert asyncio.run(m.Child().later(1)) == 2


def test_the_wrapper_is_a_plain_function_that_looks_like_the_original(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write("m", CLASSES)
    m = toy.load("m")
    original = m.Base.step
    put(toy, "m", "Base.step")
    wrapped = vars(m.Base)["step"]
    assert inspect.isfunction(wrapped)
    assert wrapped is not original
    assert wrapped.__wrapped__ is original
    for name in ("__module__", "__qualname__", "__name__", "__doc__", "attrs_3141562937"):
        assert getattr(wrapped, name) == getattr(original, name)
    assert inspect.signature(wrapped) == inspect.signature(original)
    assert pickle.loads(pickle.dumps(wrapped)) is wrapped
    assert copy.deepcopy(wrapped) is wrapped


def test_a_function_is_wrapped_under_every_name_by_which_it_was_imported(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write("m", "def f(x):\n    return x\ng = f\n")
    toy.write("user", f"from {toy.name}.m import f as mine, f\nimport {toy.name}.m\nother = [].append\n")
    user, m = toy.load("user"), toy.load("m")
    original = m.f
    target = put(toy, "m", "f")
    assert [f(1) for f in (m.f, m.g, user.f, user.mine)] == [2] * 4
    toy.write("late", f"from {toy.name}.m import f\n")
    assert toy.load("late").f(1) == 2
    wrapping.restore("p", target)
    assert all(f is original for f in (m.f, m.g, user.f, user.mine))


def test_restore_refuses_when_somebody_wrapped_on_top_and_changes_nothing(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write("m", CLASSES)
    m = toy.load("m")
    put(toy, "m", "Base.step")
    ours = m.Base.step
    m.Base.step = lambda self, x: ours(self, x) * 2
    with pytest.raises(RestoreError, match=r"p: Base\.step was replaced by .* Take that wrapper off first"):
        wrapping.restore("p")
    assert m.Base().step(5) == 12
    assert m.Override().step(5) == 51
    m.Base.step = ours


@pytest.mark.parametrize(
    "source, qualname, words",
    [
        ("", "Base.step", "KeyError: 'Base'"),
        ("class Base:\n    pass\n", "Base.step", "AttributeError"),
        ("class Base:\n    step = len\n", "Base.step", "not a plain function"),
        ("f = len\n", "f", "not a plain function"),
    ],
)
def test_what_cannot_be_wrapped_is_an_error_that_names_it(toy: Toy, source: str, qualname: str, words: str) -> None:
    toy.write("m", source)
    m = toy.load("m")
    before = dict(vars(m))
    with pytest.raises(InstallError) as error:
        wrapping.install(PATCH, make_target(m.__name__, qualname), add_one, m)
    assert f"{m.__name__}:{qualname} cannot be wrapped" in str(error.value)
    assert words in str(error.value)
    assert vars(m) == before


def test_half_a_target_is_rolled_back(toy: Toy) -> None:
    toy.write("m", CLASSES + "class Odd(Base):\n    step = len\n")
    m = toy.load("m")
    before = vars(m.Base)["step"]
    with pytest.raises(InstallError, match="not a plain function"):
        wrapping.install(PATCH, make_target(m.__name__, "Base.step"), add_one, m)
    assert vars(m.Base)["step"] is before


def test_a_class_that_refuses_to_be_changed_is_reported(toy: Toy) -> None:
    toy.write(
        "m",
        """
        class Stubborn(type):
            def __setattr__(cls, name, value):
                pass
        class Base(metaclass=Stubborn):
            def step(self, x):
                return x
        """,
    )
    m = toy.load("m")
    with pytest.raises(InstallError, match="did not stay in place"):
        wrapping.install(PATCH, make_target(m.__name__, "Base.step"), add_one, m)


def test_cover_notes_what_it_cannot_wrap_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        step: Any = len

    told: list[str] = []
    monkeypatch.setattr(wrapping, "on_uncovered", lambda patch, what: told.append(what))
    target = make_target("m", "f")
    wrapping.cover(PATCH, target, Engine, "step", add_one)
    assert "Engine.step: it is a builtin_function_or_method, not a plain function" in wrapping.trouble("p", target)
    assert len(told) == 1
    Engine.step = lambda self: 1
    wrapping.cover(PATCH, target, Engine, "step", add_one)
    assert Engine().step() == 2
    assert wrapping.trouble("p", target) == ""
    wrapping.restore("p")


def test_subclasses_that_are_made_later(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write("m", CLASSES)
    m = toy.load("m")
    target = put(toy, "m", "Base.step")

    class Late(m.Base):  # type: ignore[misc, name-defined]
        def step(self, x: int, *, scale: int = 1) -> int:
            return 1000 * x

    class Later(Late):
        def step(self, x: int, *, scale: int = 1) -> int:
            return super().step(x) + 1

    class Silent(m.Base):  # type: ignore[misc, name-defined]
        pass

    assert (Late().step(1), Later().step(1), Silent().step(1)) == (1001, 1003, 2)
    wrapping.restore("p", target)
    assert (Late().step(1), Later().step(1), Silent().step(1)) == (1000, 1001, 1)
    assert "__init_subclass__" not in vars(m.Base)


def test_a_class_keeps_its_own_init_subclass(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write(
        "m",
        """
        made = []
        class Base:
            def __init_subclass__(cls, /, tag, **kwargs):
                super().__init_subclass__(**kwargs)
                made.append((cls.__name__, tag))
            def step(self, x):
                return x
        """,
    )
    m = toy.load("m")
    before = vars(m.Base)["__init_subclass__"]
    put(toy, "m", "Base.step")

    class Heir(m.Base, tag=7):  # type: ignore[misc, name-defined, call-arg]
        def step(self, x: int) -> int:
            return 10

    assert m.made == [("Heir", 7)]
    assert Heir().step(1) == 11
    wrapping.restore("p")
    assert vars(m.Base)["__init_subclass__"] is before


def twice(original: Callable[..., int], *args: object, **kwargs: object) -> int:
    return original(*args, **kwargs) * 2


@pytest.mark.parametrize("order", [("inner", "outer"), ("outer", "inner")])
@pytest.mark.parametrize("first_out", ["inner", "outer"])
def test_stacked_patches_go_in_and_out_in_any_order(toy: Toy, order: tuple[str, str], first_out: str) -> None:
    toy.write("m", CLASSES + "def f(self, x):\n    return x\ng = f\n")
    m = toy.load("m")
    originals = (vars(m.Base)["step"], vars(m.Override)["step"], m.f)
    wrappers = {"inner": add_one, "outer": twice}
    patches = {"inner": make_patch(name="inner"), "outer": make_patch(name="outer", stacks_on=("inner",))}
    for name in order:
        for qualname in ("Base.step", "f"):
            wrapping.install(patches[name], make_target(m.__name__, qualname), wrappers[name], m)
    assert (m.Base().step(1), m.Override().step(1), m.f(0, 1), m.g(0, 1)) == (4, 22, 4, 4)
    assert m.g is m.f
    wrapping.restore(first_out)
    assert (m.Base().step(2), m.f(0, 2)) == ((4, 4) if first_out == "inner" else (3, 3))
    wrapping.restore({"inner": "outer", "outer": "inner"}[first_out])
    assert (vars(m.Base)["step"], vars(m.Override)["step"], m.f) == originals
    assert m.g is m.f


def test_a_replaced_wrapper_is_noticed_but_not_one_that_was_wrapped_again(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write("m", CLASSES)
    m = toy.load("m")
    target = put(toy, "m", "Base.step")
    ours = m.Base.step
    assert wrapping.trouble("p", target) == ""

    @functools.wraps(ours)
    def on_top(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    m.Base.step = on_top
    assert wrapping.trouble("p", target) == ""
    m.Base.step = lambda self, x: x
    assert "Base.step was replaced by" in wrapping.trouble("p", target)
    m.Base.step = ours


def test_two_patches_may_not_claim_one_target_or_one_name() -> None:
    first = make_patch(make_target("m", "f"), name="first")
    with pytest.raises(CatalogError, match="second and first both claim m:f"):
        check([first, make_patch(make_target("m", "f"), name="second")])
    with pytest.raises(CatalogError, match="first and first both claim m:f"):
        check([make_patch(make_target("m", "f"), make_target("m", "f"), name="first")])
    with pytest.raises(CatalogError, match="two patches are called 'first'"):
        check([first, make_patch(make_target("m", "g"), name="first")])
    check([first, make_patch(make_target("m", "f"), name="second", stacks_on=("first",))])


def test_a_name_of_one_module_leaves_all_others_alone(toy: Toy) -> None:
    toy.write("tools", "def measure(x):\n    return x\n")
    caller = "from {tools} import measure\ndef use(x):\n    return measure(x)\n".format(tools=f"{toy.name}.tools")
    toy.write("first", caller)
    toy.write("second", caller)
    tools, first, second = (toy.load(name) for name in ("tools", "first", "second"))
    original = tools.measure
    target = make_target(first.__name__, "measure", caller="use")
    wrapping.install(PATCH, target, add_one, first)
    try:
        assert (first.use(1), second.use(1), tools.measure(1)) == (2, 1, 1)
        assert wrapping.trouble("p", target) == ""
        assert wrapping.lives_in("p", target, first)
        assert [place for place, _ in wrapping.early_bound() if toy.name in place] == []
    finally:
        wrapping.restore("p")
    assert first.measure is original


def test_a_name_that_was_bound_while_wrapped_is_restored_as_well(toy: Toy, put: Callable[..., Target]) -> None:
    toy.write("m", "def f(x):\n    return x\n")
    original = toy.load("m").f
    put(toy, "m", "f")
    toy.write("late", f"from {toy.name}.m import f as g\n")
    late = toy.load("late")
    assert late.g(1) == 2
    wrapping.restore("p")
    assert late.g is original
    assert toy.load("m").f is original
