"""The command line, in processes of its own. verl is a folder of source files that must never be imported."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import environment, python
from verl_fixes.catalog import CATALOG
from verl_fixes.propagation import with_package

BUGGY = """
raise SystemExit("verl was imported")
class TrainingWorker:
    def _postprocess_output(self, output):
        metrics = output.pop("metrics")
        return metrics.pop("grad_norm")
"""
DRIFTED = "class TrainingWorker:\n    def _postprocess_output(self, output):\n        return output\n"


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    """A folder to put on PYTHONPATH, with a verl in it that has one of our targets."""
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "workers").mkdir()
    (tmp_path / "verl" / "version" / "version").write_text("0.8.0+fork\n")
    for package in ("verl", "verl/workers"):
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('verl was imported')")
    (tmp_path / "verl" / "workers" / "engine_workers.py").write_text(BUGGY)
    return tmp_path


def cli(verl: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{verl}:{environment()['PYTHONPATH']}"
    return python("-m", "verl_fixes", *arguments, **{"PYTHONPATH": path, **variables})


def test_status_is_a_table_for_people(verl: Path) -> None:
    done = cli(verl, "status")
    assert done.returncode == 0, done.stderr
    for part in (
        "verl 0.8.0+fork",
        str(verl),
        "scalar-metrics",
        "pending",
        "applied",
        "VERL_FIXES_SCALAR_METRICS",
        "verl#6195",
    ):
        assert part in done.stdout
    assert "absent" in done.stdout


def test_status_says_which_workers_a_release_with_two_kinds_trains_with(verl: Path) -> None:
    assert "legacy workers" not in cli(verl, "status").stdout
    config = verl / "verl" / "trainer" / "config" / "ppo_trainer.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("trainer:\n  use_legacy_worker_impl: auto\n")
    assert "trains RL through its legacy workers" in cli(verl, "status").stdout
    assert "legacy workers" in json.loads(cli(verl, "status", "--json").stdout)["default_path"]


def test_status_is_json_for_programs(verl: Path) -> None:
    status = json.loads(cli(verl, "status", "--json").stdout)
    assert status["verl"] == "0.8.0+fork"
    assert [patch["name"] for patch in status["patches"]] == [patch.name for patch in CATALOG]
    for patch in status["patches"]:
        assert set(patch) >= {"name", "state", "reason", "upstream", "env", "targets", "default", "fixed_in"}
        assert all(set(target) >= {"module", "qualname", "state"} for target in patch["targets"])
    assert (status["patches"][0]["state"], status["patches"][0]["expected"]) == ("pending", "applied")


def test_status_reports_drift_with_exit_code_1(verl: Path) -> None:
    (verl / "verl" / "workers" / "engine_workers.py").write_text(DRIFTED)
    done = cli(verl, "status")
    assert done.returncode == 1
    assert "drifted" in done.stdout
    assert cli(verl, "explain", "scalar-metrics").returncode == 1
    assert cli(verl, "status", VERL_FIXES_SCALAR_METRICS="0").returncode == 0


@pytest.mark.parametrize(
    "arguments, variables, words",
    [
        (["nonsense"], {}, "No such command"),
        (["status", "--yaml"], {}, "No such option"),
        (["explain"], {}, "Missing argument"),
        (["explain", "scalar-metric"], {}, "Did you mean scalar-metrics?"),
        (["run"], {}, "Missing argument"),
        (["status"], {"VERL_FIXES_NONSENSE": "1"}, "VERL_FIXES_NONSENSE is no variable of verl-fixes"),
        (["status"], {"VERL_FIXES_DETACH_OUTPUTS": "2"}, "neither 0 nor 1"),
        (["run", "--", "true"], {"VERL_FIXES_NONSENSE": "1"}, "VERL_FIXES_NONSENSE"),
        (["status"], {"VERL_FIXES_NONSENSE": "1", "VERL_FIXES_STRICT": "1"}, "VERL_FIXES_NONSENSE"),
    ],
)
def test_usage_errors_have_exit_code_2(verl: Path, arguments: list[str], variables: dict[str, str], words: str) -> None:
    done = cli(verl, *arguments, **variables)
    assert done.returncode == 2
    assert done.stderr.count(words) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("patch", CATALOG, ids=lambda patch: patch.name)
def test_explain_says_everything(verl: Path, patch: object) -> None:
    shown = " ".join(cli(verl, "explain", patch.name).stdout.split())  # type: ignore[attr-defined]
    for text in (patch.title, patch.hurts, patch.does, patch.removable, f"{patch.env}=0", *patch.upstream):  # type: ignore[attr-defined]
        assert " ".join(text.split()) in shown
    assert all(str(target) in shown for target in patch.targets)  # type: ignore[attr-defined]


def test_status_imports_neither_verl_nor_torch_and_is_fast(verl: Path) -> None:
    program = (
        "import sys, time; start = time.perf_counter()\n"
        "from verl_fixes.cli import main\n"
        "try: main(['status'])\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'verl', 'torch', 'ray', 'megatron', 'numpy', 'transformers'} & set(sys.modules)\n"
        "print(sorted(heavy), time.perf_counter() - start, file=sys.stderr)\n"
    )
    path = f"{verl}:{environment()['PYTHONPATH']}"
    runs = [python("-c", program, PYTHONPATH=path) for _ in range(3)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    assert all(run.stderr.startswith("[] ") for run in runs), runs[0].stderr
    assert min(float(run.stderr.split()[-1]) for run in runs) < 0.5


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = python("-c", "import sys, verl_fixes; print({'rich', 'click', 'torch', 'verl', 'numpy'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


SHOW = "import os, sys; print(os.environ['VERL_USE_EXTERNAL_MODULES'], sys.stdin.read()); sys.exit(7)"


def test_run_becomes_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verl_fixes", "run", "--", sys.executable, "-c", SHOW, "--help"],
        env=environment(VERL_USE_EXTERNAL_MODULES="mine"),
        input="from stdin",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "mine,verl_fixes from stdin\n")


def test_run_passes_signals_through() -> None:
    program = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print(1, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "verl_fixes", "run", sys.executable, "-c", program],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert process.wait(30) == 9
        assert time.monotonic() - start < 30


def test_run_says_what_it_cannot_run(tmp_path: Path) -> None:
    assert python("-m", "verl_fixes", "run", "no-such-command").returncode == 127
    done = python("-m", "verl_fixes", "run", str(tmp_path))
    assert done.returncode == 126
    assert f"cannot run '{tmp_path}'" in done.stderr


@pytest.mark.parametrize(
    "value, expected",
    [("", "verl_fixes"), ("a", "a,verl_fixes"), ("a,b,", "a,b,verl_fixes"), ("verl_fixes,a", "verl_fixes,a")],
)
def test_the_list_of_external_modules_is_extended(value: str, expected: str) -> None:
    assert with_package(value) == expected
