"""Which router replay setting a run reads, and when it cannot work with bypass_mode."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from verl_fixes.errors import UnsupportedSettingError
from verl_fixes.router_replay_settings import TARGETS, reject_r2_with_bypass_mode, replay_setting


def tree(value: Any) -> Any:
    return SimpleNamespace(**{k: tree(v) for k, v in value.items()}) if isinstance(value, dict) else value


def config(strategy: str = "megatron", legacy: str = "", engine: str = "", bypass: bool = True, impl: str = "") -> Any:
    actor = {"strategy": strategy}
    if legacy:
        actor["router_replay"] = {"mode": legacy}
    if engine:
        actor[strategy] = {"router_replay": {"mode": engine}}
    trainer = {"use_legacy_worker_impl": impl} if impl else {}
    correction = {"rollout_correction": {"bypass_mode": bypass}}
    return tree({"actor_rollout_ref": {"actor": actor}, "trainer": trainer, "algorithm": correction})


@pytest.mark.parametrize(
    "settings, has_legacy_workers",
    [
        ({"engine": "R2"}, False),
        ({"engine": "R2", "strategy": "veomni"}, False),
        ({"engine": "R2", "strategy": "veomni"}, True),
        ({"engine": "R2", "impl": "disable"}, True),
        ({"legacy": "R2"}, True),
        ({"legacy": "R2", "impl": "auto"}, True),
        ({"legacy": "R2", "engine": "R3", "impl": "enable"}, True),
    ],
)
def test_refused_where_the_run_reads_r2(settings: dict[str, str], has_legacy_workers: bool) -> None:
    with pytest.raises(UnsupportedSettingError, match=r"^r2-replay: .*bypass_mode=True.*Way out"):
        reject_r2_with_bypass_mode(config(**settings), has_legacy_workers)
    reject_r2_with_bypass_mode(config(**settings, bypass=False), has_legacy_workers)


@pytest.mark.parametrize(
    "settings, has_legacy_workers",
    [
        ({}, False),
        ({}, True),
        ({"engine": "R3"}, False),
        ({"engine": "disabled"}, False),
        ({"legacy": "R3"}, True),
        ({"legacy": "R2"}, False),  # 0.8.0 and 0.9.0 have the setting and read it nowhere
        ({"legacy": "R2", "impl": "disable"}, True),
        ({"engine": "R2", "impl": "auto"}, True),
        ({"engine": "R2", "strategy": "megatron"}, True),
        ({"legacy": "R2", "strategy": "fsdp"}, True),
    ],
)
def test_allowed_where_nothing_reads_r2(settings: dict[str, str], has_legacy_workers: bool) -> None:
    reject_r2_with_bypass_mode(config(**settings), has_legacy_workers)


@pytest.mark.parametrize("value", [None, {}, {"algorithm": None}, {"algorithm": {"rollout_correction": None}}])
def test_a_configuration_without_these_parts_is_left_alone(value: Any) -> None:
    reject_r2_with_bypass_mode(tree(value), legacy=True)


def test_the_setting_is_the_one_of_the_engine() -> None:
    assert replay_setting(config("veomni"), True) == "actor_rollout_ref.actor.veomni.router_replay.mode"


def test_unknown_code_is_drifted() -> None:
    function = ast.parse("def f(config): pass").body[0]
    assert {t.question(function, None).name for t in TARGETS if t.question} == {"DRIFTED"}  # type: ignore[arg-type]
