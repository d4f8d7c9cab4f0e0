"""Environment and arguments to decisions; what is not understood is an error that helps."""

from __future__ import annotations

import pytest

from tests.unit.conftest import make_patch
from verl_fixes.errors import ToggleError
from verl_fixes.toggles import is_strict, read

CATALOG = (make_patch(name="first-fix"), make_patch(name="second-fix", default=False))


def decide(environ: dict[str, str], **arguments: object) -> dict[str, bool]:
    return {name: decision.enabled for name, decision in read(environ, CATALOG, **arguments).patches.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "environ, arguments, expected",
    [
        ({}, {}, (True, False)),
        ({"VERL_FIXES": "0"}, {}, (False, False)),
        ({"VERL_FIXES": "0", "VERL_FIXES_SECOND_FIX": "1"}, {}, (False, False)),
        ({"VERL_FIXES": "1"}, {}, (True, False)),
        ({"VERL_FIXES_FIRST_FIX": "0"}, {}, (False, False)),
        ({"VERL_FIXES_SECOND_FIX": "1"}, {}, (True, True)),
        ({"VERL_FIXES_SECOND_FIX": " On "}, {}, (True, True)),
        ({"VERL_FIXES_SECOND_FIX": ""}, {}, (True, False)),
        ({}, {"enable": ["second-fix"], "disable": ["first-fix"]}, (False, True)),
        ({"VERL_FIXES_FIRST_FIX": "1"}, {"disable": ["first-fix"]}, (True, False)),
        ({"VERL_FIXES_SECOND_FIX": "0"}, {"enable": ["second-fix"]}, (True, False)),
    ],
)
def test_who_decides(environ: dict[str, str], arguments: dict[str, list[str]], expected: tuple[bool, bool]) -> None:
    assert tuple(decide(environ, **arguments).values()) == expected


def test_the_reason_names_what_decided() -> None:
    def why(environ: dict[str, str], **arguments: object) -> list[str]:
        return [d.why for d in read(environ, CATALOG, **arguments).patches.values()]  # type: ignore[arg-type]

    assert why({}) == ["on by default", "off by default; VERL_FIXES_SECOND_FIX=1 switches it on"]
    assert why({"VERL_FIXES": "0"}) == ["VERL_FIXES=0"] * 2
    assert why({"VERL_FIXES_FIRST_FIX": "off"})[0] == "VERL_FIXES_FIRST_FIX=off"
    assert why({}, disable=["first-fix"])[0] == "arguments of activate()"


@pytest.mark.parametrize(
    "environ, parts",
    [
        (
            {"VERL_FIXES_FRIST_FIX": "0"},
            ["VERL_FIXES_FRIST_FIX", "Did you mean VERL_FIXES_FIRST_FIX", "VERL_FIXES_STRICT"],
        ),
        ({"VERL_FIXES_FIRST_FIX": "2"}, ["VERL_FIXES_FIRST_FIX=2", "0 (off) or 1 (on)"]),
        ({"VERL_FIXES": "maybe"}, ["VERL_FIXES=maybe"]),
        ({"VERL_FIXES_STRICT": "very"}, ["VERL_FIXES_STRICT=very"]),
        ({"VERL_FIXES_LOG": "inf"}, ["VERL_FIXES_LOG=inf", "Did you mean info", "debug"]),
    ],
)
def test_an_unknown_name_or_value_is_an_error_that_helps(environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ToggleError) as error:
        read(environ, CATALOG)
    for part in parts:
        assert part in str(error.value)


def test_unknown_arguments_are_errors_too() -> None:
    with pytest.raises(ToggleError, match=r"'frist-fix'.*Did you mean first-fix"):
        read({}, CATALOG, disable=["frist-fix"])
    with pytest.raises(ToggleError, match="both enable and disable first-fix"):
        read({}, CATALOG, disable=["first-fix"], enable=["first-fix"])


def test_variables_of_others_are_left_alone() -> None:
    assert decide({"VERL_FIXESX": "nonsense", "VERL_USE_EXTERNAL_MODULES": "a,b"}) == {
        "first-fix": True,
        "second-fix": False,
    }


@pytest.mark.parametrize(
    "environ, argument, expected", [({}, None, False), ({}, True, True), ({"VERL_FIXES_STRICT": "0"}, True, False)]
)
def test_strict(environ: dict[str, str], argument: bool | None, expected: bool) -> None:
    assert read(environ, CATALOG, strict=argument).strict is expected


def test_strict_is_readable_when_other_toggles_are_not() -> None:
    assert is_strict({"VERL_FIXES_STRICT": "1", "VERL_FIXES_NONSENSE": "1"})
    assert not is_strict({"VERL_FIXES_STRICT": "0"})
    assert not is_strict({})
