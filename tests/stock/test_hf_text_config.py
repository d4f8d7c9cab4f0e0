"""hf-text-config: RoPE bases and value heads of multimodal models, part of verl#7805."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import call
from tests.stock.conftest import RELEASE

PLAIN = ("qwen2", "llama")
TEXT_CONFIG = ("qwen2_5_vl", "qwen3_vl", "internvl", "llava")
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
BOTH = "language_config, root has both"
DEEPER = (*OMNI, "language_config", "llm_config")
ROOT_THETA = "text_config, root has a theta"
ALL = {*PLAIN, *TEXT_CONFIG, *DEEPER, BOTH, ROOT_THETA, "no theta"}
NATIVE = RELEASE == "0.9.1"
"""It knows no ``llm_config``, and takes ``hidden_size`` of a root beside a ``language_config``."""


@pytest.fixture(scope="module")
def answers() -> Any:
    return call("tests.stock.jobs.text_configs:answers")


@pytest.mark.skipif(RELEASE < "0.8", reason="this release has no get_hf_rope_theta")
def test_rope_theta_is_the_text_branchs(answers: Any) -> None:
    stock, fixed, back = (answers["theta"][phase] for phase in ("stock", "fixed", "back"))
    assert set(stock) == ALL
    assert stock == back
    for name in ALL - {"no theta"}:
        bug = not NATIVE and name in (*DEEPER, BOTH, ROOT_THETA)
        if name == "llm_config" and NATIVE:
            assert "has no rope_theta" in fixed[name]
            continue
        assert (name, fixed[name]) == (name, 5678.0)
        if bug:
            assert stock[name] == 3.0 if "root has" in name else "has no rope_theta" in stock[name]
        else:
            assert stock[name] == 5678.0


@pytest.mark.skipif(RELEASE < "0.8", reason="this release has no get_hf_rope_theta")
def test_a_config_without_rope_is_told_in_verls_own_words(answers: Any) -> None:
    message = answers["theta"]["fixed"]["no theta"]
    assert message == answers["theta"]["stock"]["no theta"]
    assert "has no rope_theta" in message


def test_megatron_bridge_gets_the_hidden_size_of_the_text_branch(answers: Any) -> None:
    """For actors as well, which stock reads it for. Nothing of it stays on the config, which is saved."""
    stock, fixed, back = (answers["megatron"][phase] for phase in ("stock", "fixed", "back"))
    assert set(stock) == ALL
    assert stock == back
    for name in ALL:
        if NATIVE and name in ("llm_config", BOTH):
            assert fixed[name] == stock[name] != [96, "built", []]
            continue
        if RELEASE == "0.8.0" and name == "no theta":
            assert "has no rope_theta" in fixed[name][0]  # from 0.9.0 on the provider decides
            continue
        assert (name, fixed[name]) == (name, [96, "built", []])
        if NATIVE or name not in (*DEEPER, BOTH):
            assert stock[name] == fixed[name]
        elif name == BOTH:
            assert stock[name] == [24, "built", []]
        else:
            assert all("AttributeError" in answer for answer in stock[name][:2])


def test_trl_gets_the_hidden_size_of_the_text_branch(answers: Any) -> None:
    """From 0.8.0 on verl reads ``text_config``; models with deeper ones do not get as far as a value head there."""
    stock, fixed, back = (answers["trl"][phase] for phase in ("stock", "fixed", "back"))
    assert stock == back
    legacy = RELEASE < "0.8"
    for name in ALL if legacy else {*PLAIN, *TEXT_CONFIG, ROOT_THETA, "no theta"}:
        assert (name, fixed[name]) == (name, [96, True])
        if not legacy or name in (*PLAIN, "qwen2_5_vl", "no theta"):
            assert stock[name] == fixed[name]
        else:
            assert stock[name][0] == 24 if name == BOTH else "hidden_size" in stock[name][0]
