"""r2-replay: R2 with rollout_correction.bypass_mode is refused at start, as verl 0.9.1's validate_config does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import call
from tests.stock.conftest import RELEASE

LEGACY_WORKERS = RELEASE < "0.8"
NATIVE = RELEASE == "0.9.1"
WITHOUT_LEGACY = ", no legacy workers"
BROKEN_ENGINE = {
    f"{case}{WITHOUT_LEGACY}"
    for case in ("engine R2", "engine R2, bypass", "engine R3, bypass", "engine R2, no rollout correction")
    if RELEASE == "0.7.1"
} | ({"fully async, engine R2"} if RELEASE == "0.7.1" else set())
"""Where the run would replay with an engine that cannot."""
MEGATRON = "actor_rollout_ref.actor.megatron.router_replay.mode"
REFUSED = {
    "0.7.0": {"legacy R2, bypass"},
    "0.7.1": {"legacy R2, bypass"},
}.get(RELEASE, {"engine R2, bypass", "veomni R2, bypass", "fully async, engine R2"})
"""Where the run reads R2; the fully asynchronous configuration has bypass_mode on. Everything else is a neighbour."""


@pytest.fixture(scope="module")
def answers() -> Any:
    return call("tests.stock.jobs.router_replay_settings:answers")


def test_stock_starts_with_both_unless_it_validates_and_refuses_by_itself(answers: Any) -> None:
    for phase in ("stock", "back"):
        for name, (validated, started) in answers[phase].items():
            assert started == "ok", name
            if name in REFUSED and NATIVE:
                assert validated.startswith("ValueError: router_replay.mode='R2' requires"), name
            else:
                assert validated == "ok", name


def test_both_ways_into_a_run_refuse_r2_with_bypass_mode_and_nothing_else(answers: Any) -> None:
    assert set(answers["fixed"]) > REFUSED | BROKEN_ENGINE
    for name, (validated, started) in answers["fixed"].items():
        if name in BROKEN_ENGINE:
            assert "router replay cannot work with this verl's Megatron engine: it unpacks 2" in started, name
            assert validated == started, name
            continue
        if name not in REFUSED:
            assert (name, validated, started) == (name, "ok", "ok")
            continue
        assert started.startswith("UnsupportedSettingError: r2-replay: "), name
        assert ("ValueError: router_replay.mode='R2' requires" if NATIVE else started) in validated, name


def test_the_error_names_the_settings_of_this_run_and_the_way_out(answers: Any) -> None:
    settings = {
        "legacy R2, bypass": MEGATRON.replace(".megatron", ""),
        "veomni R2, bypass": MEGATRON.replace("megatron", "veomni"),
    }
    for name in REFUSED:
        message = answers["fixed"][name][1]
        setting = settings.get(name, MEGATRON)
        for words in (f"{setting}=R2 with", "bypass_mode=False", f"{setting}=R3", "VERL_FIXES_R2_REPLAY=0"):
            assert words in message
    assert LEGACY_WORKERS is any("legacy R2" in name for name in REFUSED)
