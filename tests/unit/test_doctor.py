"""The doctor's checks, each with the state that triggers it and a neighbour that must not. No verl, no Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import environment, python
from tests.unit.conftest import Disk, Toy, make_patch, make_target, only
from verl_fixes import wrapping
from verl_fixes.activation import Activation
from verl_fixes.doctor import Finding, Severity, has_errors, loaded, local, nodes, packages
from verl_fixes.doctor.nodes import Cluster, Node
from verl_fixes.patch import Patch, State
from verl_fixes.records import Record, TargetRecord

PLUGINS = 'import os\nos.getenv("VERL_USE_EXTERNAL_PLUGINS", "auto")\n'


def record(name: str = "some-fix", state: State = State.APPLIED, expected: State | None = None) -> Record:
    target = TargetRecord("verl.some", "f", state, f"the reason of {state}", expected or state)
    return Record(
        name=name,
        title="-",
        state=state,
        reason=f"the reason of {state}",
        expected=expected or state,
        env="VERL_FIXES_" + name.upper().replace("-", "_"),
        default=True,
        upstream=("https://github.com/o/r/pull/1",),
        fixed_in="-",
        targets=(target,),
        plumbing=False,
    )


MODULES = "VERL_USE_EXTERNAL_MODULES"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"


@pytest.mark.parametrize(
    "init, variables, severity, words",
    [
        ("", {}, "warning", "verl-fixes run --"),
        ("", {MODULES: "json"}, "warning", f"set {MODULES}=verl_fixes"),
        ("", {MODULES: "json,verl_fixes"}, "ok", MODULES),
        ("", {MODULES: "json, verl_fixes"}, "error", "without blanks"),
        ("", {POLICY: "verl_fixes"}, "warning", "loads no plugin by itself"),
        (PLUGINS, {}, "ok", "entry point"),
        (PLUGINS, {POLICY: "auto"}, "ok", "entry point"),
        (PLUGINS, {POLICY: "other, verl_fixes"}, "ok", "entry point"),
        (PLUGINS, {POLICY: "none"}, "warning", f"{POLICY}=none"),
        (PLUGINS, {POLICY: "other"}, "warning", f"add verl_fixes to {POLICY}"),
        (PLUGINS, {POLICY: "none", MODULES: "verl_fixes"}, "ok", MODULES),
    ],
)
def test_route(disk: Disk, init: str, variables: dict[str, str], severity: str, words: str) -> None:
    disk.verl(init)
    disk.distribution("verl-fixes", "0.1.0", entry_points__txt="[verl.plugins]\nverl_fixes = verl_fixes\n")
    finding = only(local.route(variables))
    assert finding.severity == severity
    assert words in f"{finding.message} {finding.way_out}"


def test_route_without_an_entry_point_and_without_verl(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.verl(PLUGINS)
    monkeypatch.setattr(local.metadata, "entry_points", lambda group: ())
    assert "pip install verl-fixes" in only(local.route({})).way_out
    monkeypatch.setattr(local.probe, "locate", lambda package: None)
    assert only(local.route({})).severity == "error"


def test_versions_come_from_the_folder_that_would_be_imported(disk: Disk, tmp_path: Path) -> None:
    disk.write("megatron/core/__init__.py", "raise SystemExit('imported')")
    disk.write("megatron/core/package_info.py", "MAJOR = 0\nMINOR = 17\nPATCH = 1\nPRE_RELEASE = ''\n")
    disk.write("mbridge/__init__.py", "raise SystemExit('imported')")
    disk.distribution("mbridge", "1.2.3")
    core, mbridge = packages.installed("megatron-core"), packages.installed("mbridge")
    assert core is not None
    assert mbridge is not None
    assert (core.version, core.folder) == ("0.17.1", tmp_path / "megatron" / "core")
    assert mbridge.version == "1.2.3"

    disk.write("checkout/mbridge/__init__.py", "__version__ = '9'")  # hides the one whose metadata is found
    sys.path.insert(0, str(tmp_path / "checkout"))
    hidden = packages.installed("mbridge")
    assert hidden is not None
    assert (hidden.version, hidden.folder) == ("9", tmp_path / "checkout" / "mbridge")
    disk.write("mbridge-1.2.3.dist-info/direct_url.json", '{"dir_info": {"editable": true}, "url": "file:///x"}')
    editable = packages.installed("mbridge")
    assert editable is not None
    assert editable.version == "1.2.3"
    assert packages.installed("megatron-bridge") is None


def test_versions_name_what_is_missing(disk: Disk) -> None:
    disk.verl()
    words = [finding.message for finding in local.versions()]
    assert f"verl 0.9.9 in {disk.folder / 'verl'}" in words
    assert "megatron-bridge is not installed" in words
    assert all(finding.severity is Severity.INFO for finding in local.versions())


@pytest.mark.parametrize(
    "state, expected, severity",
    [
        (State.APPLIED, None, "ok"),
        (State.REFINED, None, "ok"),
        (State.FAILED, None, "error"),
        (State.DRIFTED, None, "error"),
        (State.PENDING, State.DRIFTED, "error"),
        (State.PENDING, State.APPLIED, "info"),
        (State.DISABLED, None, "info"),
        (State.UPSTREAM, None, "info"),
        (State.ABSENT, None, "info"),
    ],
)
def test_patches(state: State, expected: State | None, severity: str) -> None:
    finding = only(local.patches([record(state=state, expected=expected)]))
    assert (finding.check, str(finding.severity)) == ("patch some-fix", severity)
    if severity == "error":
        assert "VERL_FIXES_SOME_FIX=0" in finding.way_out
        assert finding.link == "https://github.com/o/r/pull/1"
    assert ("not checked" in finding.message) is (expected is State.APPLIED)


def test_switches() -> None:
    assert "defaults" in only(local.switches({"HOME": "/"})).message
    found = local.switches({"VERL_FIXES_STRICT": "1", "VERL_FIXES": "0"})
    assert [finding.message for finding in found] == ["VERL_FIXES=0", "VERL_FIXES_STRICT=1"]


@pytest.mark.parametrize(
    "version, severity",
    [("0.16.1", "warning"), ("0.18.2", "warning"), ("0.19.0", "ok"), ("0.19.0rc0", "ok"), ("1.0", "ok"), ("?", "info")],
)
def test_router_losses(disk: Disk, version: str, severity: str) -> None:
    disk.write("megatron/core/__init__.py")
    disk.write("megatron/core/package_info.py", f"__version__ = {version!r}\n")
    finding = only(local.router_losses([record()]))
    assert finding.severity == severity
    if severity == "warning":
        assert finding.link == "https://github.com/NVIDIA/Megatron-LM/pull/5047"


def test_router_losses_with_our_patch_and_without_megatron(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write("megatron/core/__init__.py", "__version__ = '0.16.1'")
    assert only(local.router_losses([record("moe-aux-scale")])).severity == "ok"
    assert only(local.router_losses([record("moe-aux-scale", State.PENDING, State.APPLIED)])).severity == "ok"
    off = only(local.router_losses([record("moe-aux-scale", State.DISABLED)]))
    assert off.severity == "warning"
    assert "VERL_FIXES_MOE_AUX_SCALE=1" in off.way_out
    alone = only(local.router_losses([record("moe-aux-scale"), record("per-token-loss", State.DISABLED)]))
    assert alone.severity == "warning"
    assert "VERL_FIXES_PER_TOKEN_LOSS=1" in alone.way_out
    monkeypatch.setattr(packages.probe, "locate", lambda package: None)
    assert "not checked" in only(local.router_losses([])).message


def test_multi_token_prediction(disk: Disk) -> None:
    disk.verl()
    assert local.multi_token_prediction() == []  # a release without it
    disk.write("verl/models/mcore/mtp_patch.py")
    disk.write("verl/models/mcore/model_forward.py")
    assert only(local.multi_token_prediction()).severity == "warning"
    disk.write("verl/models/mcore/model_forward.py", "mask = _build_mtp_loss_mask_nested()\n")
    assert local.multi_token_prediction() == []
    disk.write("megatron/core/transformer/multi_token_prediction.py", "original_num_tokens = 1\n")
    assert only(local.multi_token_prediction()).severity == "info"


@pytest.mark.parametrize("unpacked, fails", [("_, params", True), ("_, params, _", False)])
def test_router_replay(disk: Disk, unpacked: str, fails: bool) -> None:
    disk.verl()
    assert local.router_replay() == []
    record = f"def merge_router_topk_indices(ids):\n    {unpacked} = preprocess_thd_no_padding(ids)\n"
    disk.write("verl/utils/megatron/router_replay_utils.py", record)
    disk.write("verl/models/mcore/util.py", "def preprocess_thd_no_padding(ids):\n    return ids, None, None\n")
    found = local.router_replay()
    assert len(found) == fails
    if fails:
        assert found[0].severity == "warning"
        assert "router_replay.mode=disabled" in found[0].way_out


FUNCTIONS = """
    def f(x):
        return "BUG" and x
    class Base:
        def inherited(self, x):
            return "BUG" and x
    class Worker(Base):
        def own(self, x):
            return "BUG" and x
"""


@pytest.fixture
def installed() -> Iterator[Callable[..., None]]:
    """Puts a wrapper around each target of a patch whatever its source says, and takes them off when the test ends."""
    names = set()

    def install(patch: Patch, module: ModuleType) -> None:
        names.add(patch.name)
        for target in patch.targets:
            wrapping.install(patch, target, target.wrapper, module)

    yield install
    for name in names:
        wrapping.restore(name)


def test_early_bound_names(toy: Toy, installed: Callable[..., None]) -> None:
    late = toy.write("late", "KEPT = []\nclass Late: ...\n")
    module = toy.write("functions", FUNCTIONS)
    functions, holder = toy.load("functions"), toy.load("late")
    original, own, inherited = functions.f, functions.Worker.own, functions.Base.inherited
    names = ("f", "Worker.own", "Worker.inherited")
    installed(make_patch(*(make_target(module, name) for name in names)), functions)
    assert wrapping.early_bound() == []  # Base rightly keeps what Worker inherits

    holder.copied, holder.right = original, functions.f
    holder.Late.method, holder.Late.other = own, staticmethod(inherited)
    assert sorted(wrapping.early_bound()) == [
        (f"{late}.Late.method", "add-one"),
        (f"{late}.Late.other", "add-one"),
        (f"{late}.copied", "add-one"),
    ]
    touched = {(cls.__name__, name, len(wrappers)) for cls, name, wrappers in wrapping.touched_classes()}
    assert touched == {("Worker", "own", 1), ("Worker", "inherited", 1)}


def test_a_name_that_has_only_the_inner_of_two_wrappers(toy: Toy, installed: Callable[..., None]) -> None:
    module = toy.write("functions", FUNCTIONS)
    functions = toy.load("functions")
    installed(make_patch(make_target(module, "f"), name="inner"), functions)
    functions.Base.kept = staticmethod(functions.f)
    functions.also = functions.f  # a name in a module gets the outer one, too
    installed(make_patch(make_target(module, "f"), name="outer", stacks_on=("inner",)), functions)
    assert (functions.f(1), functions.also(1), functions.Base.kept(1)) == (3, 3, 2)
    assert wrapping.early_bound() == [(f"{module}.Base.kept", "outer")]


def test_an_heir_that_overrides_and_one_that_does_not(toy: Toy, installed: Callable[..., None]) -> None:
    module = toy.write("functions", FUNCTIONS)
    functions = toy.load("functions")
    installed(make_patch(make_target(module, "Base.inherited"), name="base"), functions)
    functions.alias = functions.Base.inherited
    installed(make_patch(make_target(module, "Worker.inherited"), name="heir", stacks_on=("base",)), functions)
    assert wrapping.early_bound() == []


def test_early_bound_and_serialization_say_what_they_did_not_check(
    toy: Toy, active: Callable[..., Activation], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("verl.")]:
        monkeypatch.delitem(sys.modules, name)
    assert only(loaded.early_bound()).severity == "info"
    monkeypatch.setitem(sys.modules, "verl.some", ModuleType("verl.some"))
    module = toy.write("functions", FUNCTIONS)
    toy.load("functions")
    assert only(loaded.early_bound()).severity == "ok"
    active(make_patch(make_target(module, "Worker.own")))
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.cloudpickle", None)
    finding = only(loaded.serialization())
    assert (str(finding.severity), "not checked" in finding.message) == ("info", True)


ANSWER = {
    "hostname": "h",
    "python": "3.11.7",
    "verl": "0.8.0",
    "verl_fixes": "0.1.0",
    "identity": "0.1.0;some-fix=applied",
    "torch": "2.9",
    "ray": "2.60.0",
    "megatron-core": "",
    "trouble": "",
}
HERE = Node("", "this machine", "", ANSWER)


def node(failure: str = "", **unlike: str) -> Node:
    return Node("ab" * 14, "10.0.0.2", "gpu-2", {} if failure else {**ANSWER, **unlike}, failure)


def test_nodes_that_are_alike() -> None:
    cluster = Cluster(HERE, (node(), node()))
    assert only(nodes.findings("auto", cluster, {})).severity == "ok"
    assert nodes.differing(node(), HERE) == []


@pytest.mark.parametrize(
    "other, environ, severity, words",
    [
        (node("did not answer within 5 s"), {}, "error", "gpu-2 (10.0.0.2, abababab) is unreachable: did not answer"),
        (node(verl_fixes="", identity=""), {}, "error", "pip install verl-fixes=="),
        (node(verl_fixes="0.0.9"), {}, "error", "has verl-fixes 0.0.9, this machine 0.1.0"),
        (node(verl_fixes="0.1.0", trouble="ToggleError: x", identity=""), {}, "error", "does not work: ToggleError: x"),
        (node(identity="0.1.0;some-fix=disabled"), {}, "warning", "some-fix disabled; this machine runs verl-fixes"),
        (node(identity="0.1.0;some-fix=disabled"), {"VERL_FIXES_STRICT": "1"}, "error", "some-fix applied"),
        (node(torch="2.8"), {}, "warning", "torch 2.8 (here 2.9)"),
        (node(**{"megatron-core": "0.16.1"}), {}, "warning", "megatron-core 0.16.1 (here missing)"),
    ],
)
def test_nodes_that_are_not(other: Node, environ: dict[str, str], severity: str, words: str) -> None:
    finding = only(nodes.findings("auto", Cluster(HERE, (node(), other)), environ))
    assert str(finding.severity) == severity
    assert words in f"{finding.message} {finding.way_out}"


def test_no_cluster() -> None:
    finding = only(nodes.findings("auto", Cluster(HERE, trouble="nobody there"), {}))
    assert finding.severity == "error"
    assert "nobody there" in finding.message
    assert has_errors([finding])
    assert not has_errors([Finding("c", Severity.WARNING, "m")])


def doctor(disk: Disk, *arguments: str, **variables: str) -> tuple[int, str, str]:
    path = f"{disk.folder}:{environment()['PYTHONPATH']}"
    done = python("-m", "verl_fixes", "doctor", *arguments, **{"PYTHONPATH": path, **variables})
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_the_command(disk: Disk) -> None:
    disk.verl("print('noise')\n" + PLUGINS, platforms=("nvidia",))
    code, out, _ = doctor(disk, "--json")
    answer = json.loads(out)
    assert answer["verl"] == "0.9.9"
    assert {"check", "severity", "message", "way_out", "link"} == set(answer["findings"][0])
    assert code == (1 if "error" in {finding["severity"] for finding in answer["findings"]} else 0)
    assert doctor(disk, "--json", VERL_PLATFORM="nonsense")[0] == 1
    shown = doctor(disk, VERL_PLATFORM="nonsense")[1]
    assert "VERL_PLATFORM=nonsense names a platform" in " ".join(shown.split())
    assert doctor(disk, VERL_FIXES_NONSENSE="1")[0] == 2
    assert doctor(disk, "--timeout", "soon")[0] == 2


def test_the_command_where_verl_cannot_be_imported(disk: Disk) -> None:
    disk.verl("raise SystemExit('not today')")
    code, out, _ = doctor(disk, "--json")
    assert code == 1
    assert "verl cannot be imported: SystemExit: not today" in [f["message"] for f in json.loads(out)["findings"]]


def test_the_command_where_ray_is_missing(disk: Disk) -> None:
    disk.verl(PLUGINS)
    disk.write("ray.py", "raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')")
    code, out, _ = doctor(disk, "--ray", "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["nodes"] == []
    assert answer["findings"][-1]["message"] == (
        "cannot ask the cluster at auto: ModuleNotFoundError: No module named 'ray'"
    )
