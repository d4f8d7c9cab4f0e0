"""One process: decide, hook, probe, apply, roll back. States are what is true, not what was intended."""

from __future__ import annotations

import functools
import importlib
import io
import json
import sys
import threading
from collections.abc import Callable

import pytest

from tests.unit.conftest import Toy, add_one, make_patch, make_target
from verl_fixes.activation import Activation
from verl_fixes.errors import CatalogError, RestoreError, StrictError, ToggleError
from verl_fixes.patch import Patch, State
from verl_fixes.probe import Source

BUGGY = "def f(x):\n    return x, 'BUG'\n"
Active = Callable[..., Activation]


def first(original: Callable[..., tuple[int, str]], x: int) -> int:
    return original(x)[0] + 1


def patch_f(module: str, **more: object) -> Patch:
    return make_patch(make_target(module, "f", first), **more)


def states(activation: Activation) -> list[tuple[str, str]]:
    return [(str(record.state), str(record.expected)) for record in activation.status()]


def test_pending_until_imported_then_applied_then_gone(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)
    activation = active(patch_f(module))
    assert states(activation) == [("pending", "applied")]
    assert module not in sys.modules
    m = toy.load("m")
    assert m.f(1) == 2
    assert states(activation) == [("applied", "applied")]
    activation.deactivate()
    assert m.f(1) == (1, "BUG")
    assert states(activation) == [("disabled", "disabled")]
    activation.activate()
    assert m.f(1) == 2


def test_a_module_that_was_there_first(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)
    m = toy.load("m")
    original = m.f
    activation = active(patch_f(module))
    assert m.f(1) == 2
    activation.deactivate()
    assert m.f is original


def test_an_import_after_deactivate_stays_stock(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)
    activation = active(patch_f(module))
    activation.deactivate()
    assert toy.load("m").f(1) == (1, "BUG")
    activation.activate()
    assert toy.load("m").f(1) == 2


def test_activating_again_and_again_wraps_once(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)
    activation = active(patch_f(module))
    m = toy.load("m")
    wrapped = m.f
    for _ in range(3):
        activation.activate()
    assert m.f is wrapped
    assert m.f(1) == 2


def test_changed_decisions_take_effect(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)
    activation = active(patch_f(module))
    m = toy.load("m")
    activation.activate(disable=["add-one"])
    assert m.f(1) == (1, "BUG")
    assert activation.status()[0].reason == "arguments of activate()"
    activation.activate()
    assert m.f(1) == 2


@pytest.mark.parametrize(
    "word, state", [("BUG", "applied"), ("HALF", "refined"), ("FIX", "upstream"), ("-", "drifted")]
)
def test_the_code_decides_the_state(toy: Toy, active: Active, word: str, state: str) -> None:
    module = toy.write("m", f"def f(x):\n    return x, '{word}'\n")
    activation = active(patch_f(module))
    assert states(activation) == [("pending" if state in ("applied", "refined") else state, state)]
    m = toy.load("m")
    assert states(activation) == [(state, state)]
    assert m.f(1) == (2 if state in ("applied", "refined") else (1, word))


def test_refine_goes_around_code_that_upstream_fixed_in_part(toy: Toy, active: Active) -> None:
    module = toy.write("m", "def f(x):\n    return x, 'HALF'\n")
    target = make_target(module, "f", first, refine=lambda original, x: "refined")
    active(make_patch(target))
    assert toy.load("m").f(1) == "refined"


def test_absent_code_and_absent_packages(toy: Toy, active: Active) -> None:
    activation = active(patch_f(f"{toy.name}.none"), make_patch(make_target("no_such_package.m", "f"), name="other"))
    assert states(activation) == [("absent", "absent")] * 2
    assert activation.status()[1].reason == "no_such_package is not installed"


def test_a_function_that_releases_call_differently(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)

    def has(name: str) -> Callable[[Source], bool]:
        return lambda source: source.function(module, name) is not None

    former = make_target(module, "old", first, exists=has("old"), absent="it is called f here")
    moved = make_target(module, "lost", first, exists=lambda source: not has("old")(source))
    activation = active(
        make_patch(former, make_target(module, "f", first, exists=has("f")), name="renamed"),
        make_patch(moved, name="moved"),
    )
    assert toy.load("m").f(1) == 2
    renamed, lost = activation.status()
    assert [(str(target.state), target.reason) for target in renamed.targets] == [
        ("absent", "it is called f here"),
        ("applied", "this release has the bug"),
    ]
    assert lost.state is State.DRIFTED


def test_an_atomic_patch_does_not_go_in_where_part_of_its_code_is_missing(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)
    targets = (make_target(module, "f", first), make_target(f"{toy.name}.none", "f", first))
    loose = active(make_patch(*targets, name="loose", atomic=False))
    assert states(loose) == [("pending", "applied")]
    loose.deactivate()
    activation = active(make_patch(*targets))
    assert states(activation) == [("drifted", "drifted")]
    activation.deactivate()
    alone = active(make_patch(*targets, name="alone"))
    assert toy.load("m").f(1) == (1, "BUG")
    assert [target.state for target in alone.status()[0].targets] == [State.DRIFTED] * 2


def test_reloading_a_module_brings_the_fix_back(toy: Toy, active: Active) -> None:
    module = toy.write("m", "class C:\n    def f(self, x):\n        return x, 'BUG'\n")
    wrapper = lambda original, self, x: original(self, x)[0] + 1  # noqa: E731
    activation = active(make_patch(make_target(module, "C.f", wrapper)))
    m = toy.load("m")
    assert m.C().f(1) == 2
    importlib.reload(m)
    assert states(activation) == [("applied", "applied")]
    assert m.C().f(1) == 2
    del sys.modules[module]
    again = toy.load("m")
    assert states(activation) == [("applied", "applied")]
    assert again.C().f(1) == 2


def test_reloading_brings_functions_and_imported_names_back(toy: Toy, active: Active) -> None:
    tools = toy.write("tools", BUGGY)
    module = toy.write("m", f"from {tools} import f\ndef g(x):\n    'BUG'\n    return f(x)\n")
    activation = active(make_patch(make_target(module, "f", first, caller="g"), make_target(module, "g")))
    m = toy.load("m")
    assert m.g(1) == 3
    importlib.reload(m)
    assert states(activation) == [("applied", "applied")]
    assert m.g(1) == 3
    activation.deactivate()
    assert m.g(1) == (1, "BUG")


def test_a_wrapper_that_somebody_replaced_is_not_called_applied(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)
    activation = active(patch_f(module))
    m = toy.load("m")
    ours, m.f = m.f, lambda x: x
    record = activation.status()[0]
    assert record.state is State.FAILED
    assert "m.f was replaced by" in record.reason
    m.f = ours
    assert states(activation) == [("applied", "applied")]


def test_a_later_class_that_cannot_be_wrapped_is_said_so_and_in_strict_mode_is_an_error(
    toy: Toy, active: Active, capsys: pytest.CaptureFixture[str]
) -> None:
    module = toy.write("m", "class C:\n    def f(self, x):\n        return 'BUG'\n")
    patch = make_patch(make_target(module, "C.f"))
    activation = active(patch)
    m = toy.load("m")

    class Odd(m.C):  # type: ignore[misc, name-defined]
        f = len

    assert "add-one is failed for a class that was made later" in capsys.readouterr().err
    assert activation.status()[0].state is State.FAILED
    activation.deactivate()
    activation = active(patch, strict=False)
    del Odd.f
    activation.activate(strict=True)
    with pytest.raises(StrictError, match=r"Odder\.f could not be wrapped"):

        class Odder(m.C):  # type: ignore[misc, name-defined]
            f = len


def test_a_broken_stderr_does_not_break_the_import(toy: Toy, active: Active, monkeypatch: pytest.MonkeyPatch) -> None:
    module = toy.write("m", "def f(x):\n    return x\n")
    active(patch_f(module))
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert toy.load("m").f(1) == 1


def test_drifted_code_is_left_alone_and_said_so_once(
    toy: Toy, active: Active, capsys: pytest.CaptureFixture[str]
) -> None:
    module = toy.write("m", "def f(x):\n    return x\n")
    activation = active(patch_f(module))
    assert toy.load("m").f(1) == 1
    activation.activate()
    activation.status()
    said = capsys.readouterr().err
    assert said.count("add-one is drifted") == 1
    assert f"{module}:f" in said
    assert "VERL_FIXES_ADD_ONE=0 silences this" in said


def test_one_drifted_target_takes_the_whole_patch_out(toy: Toy, active: Active) -> None:
    one, two = toy.write("one", BUGGY), toy.write("two", "def f(x):\n    return x\n")
    three = toy.write("three", BUGGY)
    targets = [make_target(module, "f", first) for module in (one, two, three)]
    activation = active(make_patch(*targets))
    m = toy.load("one")
    original = m.f.__wrapped__
    assert m.f(1) == 2
    toy.load("two")
    assert m.f is original
    assert toy.load("three").f(1) == (1, "BUG")
    record = activation.status()[0]
    assert [target.state for target in record.targets] == [State.DRIFTED] * 3
    assert "taken out with the rest of add-one" in record.targets[0].reason
    assert "left out with the rest of add-one" in record.targets[2].reason


def test_a_patch_whose_second_target_fails_is_rolled_back(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY + "h = f\ndef k():\n    'BUG'\nk = len\n")
    activation = active(make_patch(make_target(module, "f", first), make_target(module, "k")))
    m = toy.load("m")
    assert m.f(1) == (1, "BUG")
    assert m.h is m.f
    record = activation.status()[0]
    assert record.state is State.FAILED
    assert "not a plain function" in record.reason


def test_targets_that_stand_alone_do_not_take_each_other_out(toy: Toy, active: Active) -> None:
    good, bad = toy.write("good", BUGGY), toy.write("bad", "def f(x):\n    return x\n")
    activation = active(make_patch(make_target(bad, "f", first), make_target(good, "f", first), atomic=False))
    toy.load("bad")
    assert toy.load("good").f(1) == 2
    record = activation.status()[0]
    assert record.state is State.DRIFTED
    assert [target.state for target in record.targets] == [State.DRIFTED, State.APPLIED]


def test_units_of_an_atomic_patch_stand_alone_and_are_whole_in_themselves(toy: Toy, active: Active) -> None:
    drifted = "def f(x):\n    return x\n"
    one, two, old = toy.write("one", BUGGY), toy.write("two", drifted), toy.write("old", BUGGY)
    missing = f"{toy.name}.none"
    targets = [
        make_target(one, "f", first),
        make_target(two, "f", first),
        make_target(old, "f", first, unit="old"),
        make_target(missing, "f", first, unit="older"),
    ]
    activation = active(make_patch(*targets))
    assert [target.expected for target in activation.status()[0].targets][2:] == [State.APPLIED, State.ABSENT]
    m = toy.load("one")
    assert m.f(1) == 2
    assert toy.load("old").f(1) == 2
    toy.load("two")
    assert m.f(1) == (1, "BUG")
    assert toy.load("old").f(1) == 2
    record = activation.status()[0]
    assert record.state is State.DRIFTED
    states_now = [target.state for target in record.targets]
    assert states_now == [State.DRIFTED, State.DRIFTED, State.APPLIED, State.ABSENT]


def test_a_name_that_a_module_imported_is_judged_by_the_function_that_calls_it(toy: Toy, active: Active) -> None:
    tools = toy.write("tools", "def measure(x):\n    return x\n")
    toy.write("m", f"from {tools} import measure\ndef use(x):\n    'BUG'\n    return measure(x)\n")
    activation = active(make_patch(make_target(f"{toy.name}.m", "measure", caller="use")))
    assert states(activation) == [("pending", "applied")]
    m = toy.load("m")
    assert (m.use(1), toy.load("tools").measure(1)) == (2, 1)
    activation.deactivate()
    assert m.use(1) == 1


def test_strict_stops_the_import_of_drifted_code_again_and_again(toy: Toy, active: Active) -> None:
    module = toy.write("m", "def f(x):\n    return x\n")
    activation = active(patch_f(module), strict=True)
    for _ in range(3):
        with pytest.raises(StrictError) as error:
            toy.load("m")
        assert module not in sys.modules
    for part in ("add-one is drifted", f"{module}:f", "VERL_FIXES_ADD_ONE=0", "VERL_FIXES_STRICT=0"):
        assert part in str(error.value)
    assert states(activation) == [("drifted", "drifted")]
    toy.write("m", BUGGY + "# longer\n")
    assert toy.load("m").f(1) == 2


def test_strict_stops_at_activation_when_the_code_is_there_already(toy: Toy) -> None:
    module = toy.write("m", "def f(x):\n    return x\n")
    toy.load("m")
    with pytest.raises(StrictError, match="add-one is drifted"):
        Activation([patch_f(module)]).activate(strict=True)
    assert toy.load("m").f(1) == 1


def test_a_broken_question_or_file_is_a_failed_record_and_not_a_broken_import(toy: Toy, active: Active) -> None:
    def question(function: object, source: object) -> None:
        raise RuntimeError("the question itself is broken")

    module = toy.write("m", BUGGY)
    target = make_target(module, "f", first)
    object.__setattr__(target, "question", question)
    activation = active(make_patch(target))
    assert toy.load("m").f(1) == (1, "BUG")
    record = activation.status()[0]
    assert record.state is State.FAILED
    assert "RuntimeError: the question itself is broken" in record.reason


def test_a_failing_import_of_the_user_is_theirs_and_the_next_try_is_patched(toy: Toy, active: Active) -> None:
    module = toy.write("m", "import no_such_module_at_all\n" + BUGGY)
    activation = active(patch_f(module))
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        toy.load("m")
    assert states(activation) == [("pending", "applied")]
    toy.write("m", BUGGY)
    assert toy.load("m").f(1) == 2


def test_activation_in_the_middle_of_the_modules_own_import(toy: Toy, active: Active) -> None:
    module = toy.write("m", f"from {toy.name} import trigger\n" + BUGGY)
    toy.write("trigger", "import builtins\nbuiltins.toy_activate()\n")
    made: list[Activation] = []
    import builtins

    builtins.toy_activate = lambda: made.append(active(patch_f(module)))  # type: ignore[attr-defined]
    try:
        m = toy.load("m")
    finally:
        del builtins.toy_activate  # type: ignore[attr-defined]
    assert m.f(1) == 2
    assert states(made[0]) == [("applied", "applied")]
    assert type(m.__spec__).__name__ == "ModuleSpec"


def test_a_module_that_another_thread_is_importing(toy: Toy, active: Active) -> None:
    module = toy.write("m", f"from {toy.name} import gate\ngate.reached.set()\ngate.open.wait(20)\n" + BUGGY)
    toy.write("gate", "import threading\nreached, open = threading.Event(), threading.Event()\n")
    gate = toy.load("gate")
    importer = threading.Thread(target=toy.load, args=("m",))
    importer.start()
    assert gate.reached.wait(20)
    activation = active(patch_f(module))
    assert states(activation) == [("pending", "applied")]
    gate.open.set()
    importer.join(20)
    assert toy.load("m").f(1) == 2
    assert states(activation) == [("applied", "applied")]


def test_many_threads_activate_and_import_at_once(toy: Toy) -> None:
    names = [f"m{i}" for i in range(8)]
    patches = [patch_f(toy.write(name, "import time\ntime.sleep(0.01)\n" + BUGGY), name=name) for name in names]
    activation = Activation(patches)
    jobs = [lambda n=n: toy.load(n) for n in names] + [activation.activate, activation.status] * 8
    start = threading.Barrier(len(jobs))
    errors: list[BaseException] = []

    def work(job: Callable[[], object]) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors
    assert states(activation) == [("applied", "applied")] * 8
    assert [toy.load(name).f(1) for name in names] == [2] * 8
    activation.deactivate()


def test_stacked_patches_go_in_and_out_in_order(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)
    inner = patch_f(module, name="inner")
    outer = make_patch(
        make_target(module, "f", lambda original, x: original(x) * 10), name="outer", stacks_on=("inner",)
    )
    m = toy.load("m")
    original = m.f
    activation = active(inner, outer)
    assert m.f(1) == 20
    activation.activate(disable=["outer"])
    assert m.f(1) == 2
    activation.activate(disable=["inner"], enable=["outer"])
    assert m.f(1) == original(1) * 10
    activation.deactivate()
    assert m.f is original


def test_deactivate_refuses_when_somebody_wrapped_on_top_and_restores_the_rest(toy: Toy, active: Active) -> None:
    module, other = toy.write("m", BUGGY), toy.write("n", BUGGY)
    activation = active(patch_f(module), patch_f(other, name="other"))
    m, n = toy.load("m"), toy.load("n")
    ours = m.f

    @functools.wraps(ours)
    def on_top(x: int) -> object:
        return ours(x)

    m.f = on_top
    with pytest.raises(RestoreError, match="add-one"):
        activation.deactivate()
    assert n.f(1) == (1, "BUG")
    assert states(activation) == [("applied", "applied"), ("disabled", "disabled")]
    m.f = ours
    activation.deactivate()
    assert m.f(1) == (1, "BUG")


def test_an_unknown_toggle_or_a_catalog_that_conflicts_changes_nothing(
    toy: Toy, active: Active, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = toy.write("m", BUGGY)
    activation = active(patch_f(module))
    m = toy.load("m")
    with pytest.raises(ToggleError):
        activation.activate(disable=["nonsense"])
    monkeypatch.setenv("VERL_FIXES_NONSENSE", "1")
    with pytest.raises(ToggleError):
        activation.activate()
    assert m.f(1) == 2
    with pytest.raises(CatalogError):
        Activation([patch_f(module), patch_f(module, name="other")]).activate(environ={})


def test_records_are_complete_and_plain(toy: Toy, active: Active) -> None:
    module = toy.write("m", BUGGY)
    record = active(patch_f(module)).status()[0].as_dict()
    assert set(record) >= {"name", "state", "reason", "upstream", "env", "targets", "default", "fixed_in"}
    assert record["env"] == "VERL_FIXES_ADD_ONE"
    assert set(record["targets"][0]) >= {"module", "qualname", "state"}
    assert json.loads(json.dumps(record))["state"] == "pending"


@pytest.mark.parametrize("level, lines", [("warning", 0), ("info", 1), ("debug", 2)])
def test_log_levels(toy: Toy, active: Active, capsys: pytest.CaptureFixture[str], level: str, lines: int) -> None:
    module, fixed = toy.write("m", BUGGY), toy.write("n", "def f(x):\n    return 'FIX'\n")
    active(patch_f(module), patch_f(fixed, name="other"), environ={"VERL_FIXES_LOG": level})
    toy.load("m")
    toy.load("n")
    assert capsys.readouterr().err.count("verl-fixes: ") == lines


def test_add_one_adds_one() -> None:
    assert add_one(lambda: 1) == 2
