"""What validate_config and run_ppo of this release say to R2 and bypass_mode, on verl's own composed configurations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from tests.stock.jobs.phases import phases

ROOT = Path(verl.__file__).parent
BYPASS = "algorithm.rollout_correction.bypass_mode"
BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)


def composed(name: str, *overrides: str, folder: str = "trainer/config") -> DictConfig:
    with initialize_config_dir(str(ROOT / folder), version_base=None):
        return compose(name, [*BATCHES, *overrides])


def validate(config: DictConfig) -> str:
    from verl.utils.config import validate_config

    return attempt(lambda: validate_config(config=config, use_reference_policy=False, use_critic=False))


def start(config: DictConfig) -> str:
    """``run_ppo`` up to the task runner that it starts; Ray is a stand-in."""
    from verl.trainer import main_ppo

    runner = mock.Mock()
    with mock.patch.object(main_ppo, "ray") as ray:
        ray.is_initialized.return_value = True
        answer = attempt(lambda: main_ppo.run_ppo(config, task_runner_class=runner))
    assert runner.remote.called is (answer == "ok"), answer
    return answer


def attempt(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


ACTOR = "actor_rollout_ref.actor"
LEGACY, ENGINE, VEOMNI = (f"{ACTOR}.{part}router_replay.mode" for part in ("", "megatron.", "veomni."))
CASES: dict[str, dict[str, Any]] = {
    "neither": {},
    "legacy R2": {LEGACY: "R2"},
    "legacy R2, bypass": {LEGACY: "R2", BYPASS: True},
    "legacy R3, bypass": {LEGACY: "R3", BYPASS: True},
    "engine R2": {ENGINE: "R2"},
    "engine R2, bypass": {ENGINE: "R2", BYPASS: True},
    "engine R3, bypass": {ENGINE: "R3", BYPASS: True},
    "disabled, bypass": {BYPASS: True},
    "engine R2, no rollout correction": {ENGINE: "R2", "algorithm.rollout_correction": None},
}


def case(base: DictConfig, settings: dict[str, Any]) -> DictConfig | None:
    """A copy with other settings, None where this release does not have one of them."""
    config = base.copy()
    with open_dict(config):
        for name, value in settings.items():
            if OmegaConf.select(config, name, default=KeyError) is KeyError:
                return None
            OmegaConf.update(config, name, value)
    return config


def answers() -> dict[str, dict[str, list[str]]]:
    """For each case what ``validate_config`` and ``run_ppo`` say: stock, with the wrappers, and without them again."""
    megatron = composed("ppo_megatron_trainer")
    configs = {name: case(megatron, settings) for name, settings in CASES.items()}
    if OmegaConf.select(megatron, "trainer.use_legacy_worker_impl"):
        engines = composed("ppo_megatron_trainer", "trainer.use_legacy_worker_impl=disable")
        configs |= {f"{name}, no legacy workers": case(engines, settings) for name, settings in CASES.items()}
    if (ROOT / "trainer/config/model_engine/veomni.yaml").exists():
        veomni = composed("ppo_trainer", "model_engine=veomni")
        configs["veomni R2, bypass"] = case(veomni, {VEOMNI: "R2", BYPASS: True})
        configs["veomni R2"] = case(veomni, {VEOMNI: "R2"})
    fsdp = composed("ppo_trainer")
    configs["fsdp, bypass"] = case(fsdp, {BYPASS: True})
    configs["fsdp, legacy R2, bypass"] = case(fsdp, {LEGACY: "R2", BYPASS: True})
    fully_async = "experimental/fully_async_policy/config"
    if (ROOT / fully_async / "fully_async_ppo_megatron_trainer.yaml").exists():
        os.chdir(ROOT.parent)  # its search path is relative
        configs["fully async"] = composed("fully_async_ppo_megatron_trainer", folder=fully_async)
        configs["fully async, engine R2"] = case(configs["fully async"], {ENGINE: "R2"})
    known = {name: config for name, config in configs.items() if config is not None}

    def measure() -> dict[str, list[str]]:
        return {name: [validate(config), start(config)] for name, config in known.items()}

    return phases(measure)
