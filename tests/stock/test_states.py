"""Which state each patch has on this release, and how the plugin gets into it."""

from __future__ import annotations

import json
import sys
import time

import pytest
import tomllib

from tests.processes import ROOT, call, python, script
from verl_fixes.catalog import CATALOG

EXPECTED = tomllib.loads((ROOT / "tests" / "states.toml").read_text())
STATES = "tests.stock.jobs.states"
EVERYTHING = {patch.env: "1" for patch in CATALOG if not patch.default}


def test_every_patch_has_the_state_of_the_table_and_is_really_there(release: str) -> None:
    answer = call(f"{STATES}:states")
    assert answer["patches"] == {name: states[release] for name, states in EXPECTED.items()}
    for name, targets in answer["targets"].items():
        for target, state in targets.items():
            expected = EXPECTED[name].get("targets", {}).get(target, EXPECTED[name])
            assert (target, state) == (target, expected[release])
    assert answer["installed but not changed"] == []
    assert answer["changed but not installed"] == []
    assert answer["not restored"] == []
    assert answer["disabled"] == ["disabled"]


def test_the_fingerprint_and_the_question_agree() -> None:
    answers = call(f"{STATES}:judgements")
    assert answers
    for target, by_fingerprint, by_question in answers:
        assert (target, by_fingerprint) == (target, by_question)


def test_the_command_line_knows_it_beforehand_without_importing_verl(release: str) -> None:
    program = (
        "import sys\nfrom verl_fixes.cli import main\n"
        "try: main(['status', '--json'])\nexcept SystemExit as stop: assert not stop.code\n"
        "assert not {'verl', 'torch', 'ray', 'megatron', 'numpy'} & set(sys.modules)\n"
    )
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        done = python("-c", program, **EVERYTHING)
        seconds.append(time.monotonic() - start)
        assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["verl"] == release
    assert bool(status["default_path"]) is (release < "0.8")
    assert {p["name"]: p["expected"] for p in status["patches"]} == {n: s[release] for n, s in EXPECTED.items()}
    assert min(seconds) < 1  # with the interpreter's own start, on a machine that does something else as well


ENGINE = "verl.workers.engine.fsdp.transformer_impl"
WORKERS = "verl.workers.engine_workers"
REPORT = """
import json, inspect
import verl_fixes
from verl.workers.engine_workers import TrainingWorker
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
def depth(function):
    return 0 if not hasattr(function, "__wrapped__") else 1 + depth(function.__wrapped__)
records = {t.qualname: str(t.state) for r in verl_fixes.status() for t in r.targets}
print(json.dumps([records["TrainingWorker._postprocess_output"], records["FSDPEngineWithLMHead.forward_step"],
                  depth(TrainingWorker._postprocess_output), depth(FSDPEngineWithLMHead.forward_step)]))
"""
PLUGIN_FIRST = f"import verl_fixes, {WORKERS}, {ENGINE}\n"
ENGINE_FIRST = f"import {WORKERS}, {ENGINE}\nimport verl_fixes\n"
HALF_AND_HALF = (
    f"import verl\nimport verl.workers\nimport verl_fixes, {WORKERS}\nverl_fixes.activate()\nimport {ENGINE}\n"
)
THREADS = f"""
import importlib, threading
names = ["verl_fixes", "{WORKERS}", "verl_fixes", "{ENGINE}", "verl.workers.engine.megatron.transformer_impl", "verl"]
start = threading.Barrier(len(names))
def work(name):
    start.wait()
    importlib.import_module(name)
threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join(120)
assert not any(thread.is_alive() for thread in threads), "deadlock"
"""


@pytest.mark.parametrize(
    "program, variables",
    [
        pytest.param(PLUGIN_FIRST, {}, id="plugin first"),
        pytest.param(ENGINE_FIRST, {"VERL_USE_EXTERNAL_PLUGINS": "none"}, id="engine first"),
        pytest.param(HALF_AND_HALF, {}, id="in between, and again"),
        pytest.param(f"import {WORKERS}, {ENGINE}", {"VERL_USE_EXTERNAL_MODULES": "verl_fixes"}, id="external module"),
        pytest.param(PLUGIN_FIRST, {"VERL_USE_EXTERNAL_MODULES": "json,verl_fixes"}, id="plugin twice"),
        pytest.param(THREADS, {}, id="threads at once"),
    ],
)
def test_every_route_and_every_order_of_imports(release: str, program: str, variables: dict[str, str]) -> None:
    worker, engine, *depths = script(program + REPORT, **variables)
    assert worker == EXPECTED["scalar-metrics"][release]
    assert engine == EXPECTED["detach-outputs"]["targets"]["fsdp.FSDPEngineWithLMHead.forward_step"][release]
    assert depths == [1, 0 if engine == "upstream" else 1]


def test_the_entry_point_is_found_by_verl_itself(release: str) -> None:
    program = "import sys, verl; print('verl_fixes' in sys.modules)"
    found = python("-c", program).stdout.split()[-1:] == ["True"]
    assert found is (release >= "0.9")
    assert python("-c", program, VERL_USE_EXTERNAL_PLUGINS="none").stdout.split()[-1:] == ["False"]


def test_run_brings_it_into_every_release() -> None:
    program = "import sys, verl; print(sys.modules['verl_fixes'].__version__)"
    done = python("-m", "verl_fixes", "run", "--", sys.executable, "-c", program)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["0.1.0"]), done.stderr
