"""``import verl_fixes`` itself: it activates, and it never breaks the program that imports it, unless strict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import environment, python, script

REPORT = "import json; print(json.dumps([[str(r.state), r.reason] for r in verl_fixes.status()]))"


@pytest.fixture
def drifted(tmp_path: Path) -> str:
    (tmp_path / "verl" / "workers").mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").touch()
    (tmp_path / "verl" / "workers" / "__init__.py").touch()
    engine_workers = tmp_path / "verl" / "workers" / "engine_workers.py"
    engine_workers.write_text(
        "class TrainingWorker:\n    def _postprocess_output(self, output):\n        return output\n"
    )
    return f"{tmp_path}:{environment()['PYTHONPATH']}"


def test_everything_can_be_switched_off() -> None:
    report = "import json; print(json.dumps({r.name: [str(r.state), r.reason] for r in verl_fixes.status()}))"
    records = script(f"import verl_fixes; {report}", VERL_FIXES="0")
    assert records.pop("ray-propagation")[0] != "disabled"  # it tells the workers
    assert {tuple(record) for record in records.values()} == {("disabled", "VERL_FIXES=0")}
    records = script(f"import verl_fixes; {report}", VERL_FIXES="0", VERL_FIXES_RAY_PROPAGATION="0")
    assert records["ray-propagation"] == ["disabled", "VERL_FIXES_RAY_PROPAGATION=0"]


def test_an_unknown_toggle_applies_nothing_and_warns_once() -> None:
    done = python("-c", f"import verl_fixes; {REPORT}", VERL_FIXES_NONSENSE="1")
    assert done.returncode == 0
    assert done.stderr.count("VERL_FIXES_NONSENSE is no variable of verl-fixes") == 1
    assert done.stdout.count('"failed"') == done.stdout.count("ToggleError") > 0


def test_an_unknown_toggle_stops_a_strict_process() -> None:
    done = python("-c", "import verl_fixes", VERL_FIXES_NONSENSE="1", VERL_FIXES_STRICT="1")
    assert done.returncode == 1
    assert "ToggleError" in done.stderr


def test_a_loader_that_swallows_errors_does_not_get_past_strict(drifted: str) -> None:
    program = (
        "try:\n    import verl_fixes\nexcept Exception:\n    pass\n"
        "import verl\n"
        "try:\n    import verl.workers.engine_workers\nexcept Exception as error:\n    print(type(error).__name__)\n"
        "import verl.workers.engine_workers\n"
    )
    done = python("-c", program, PYTHONPATH=drifted, VERL_FIXES_NONSENSE="1", VERL_FIXES_STRICT="1")
    assert done.stdout.strip() == "ToggleError"
    assert done.returncode == 1


def test_drift_is_a_warning_or_in_strict_mode_an_error(drifted: str) -> None:
    program = "import verl_fixes, verl.workers.engine_workers; print('goes on')"
    done = python("-c", program, PYTHONPATH=drifted)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert done.stderr.count("scalar-metrics is drifted") == 1
    done = python("-c", program, PYTHONPATH=drifted, VERL_FIXES_STRICT="1")
    assert done.returncode == 1
    assert "StrictError: scalar-metrics is drifted" in done.stderr
    done = python("-c", program, PYTHONPATH=drifted, VERL_FIXES_STRICT="1", VERL_FIXES_SCALAR_METRICS="0")
    assert done.returncode == 0


def test_an_internal_error_is_a_failed_record_and_a_warning() -> None:
    program = f"import sys; sys.modules['wrapt'] = None; import verl_fixes; {REPORT}"
    done = python("-c", program)
    assert done.returncode == 0
    assert "nothing is applied in this process" in done.stderr
    assert '"failed"' in done.stdout
    assert python("-c", program, VERL_FIXES_STRICT="1").returncode == 1
