"""Where the text branch of a config is, and that nothing of it stays where it does not belong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_fixes.patches.hf_text_config import find_rope_theta, text_branch, text_hidden_size, text_value

TEXT = ("text_config", "thinker_config", "language_config", "llm_config")
OTHERS = ("vision_config", "audio_config", "talker_config", "code2wav_config", "token2wav_config", "encoder")

values = st.integers(1, 9)
leaves = st.builds(lambda size: SimpleNamespace(hidden_size=size, branch=True), values)


def _config(inner: Any, names: tuple[str, str], other: int, root: int | None) -> Any:
    config = SimpleNamespace(**{names[0]: inner, names[1]: SimpleNamespace(hidden_size=-other, rope_theta=-other)})
    if root is not None:
        config.hidden_size = -root
    return config


configs = st.recursive(
    leaves,
    lambda inner: st.builds(
        _config, inner, st.tuples(st.sampled_from(TEXT), st.sampled_from(OTHERS)), values, st.none() | values
    ),
    max_leaves=4,
)


@given(configs)
def test_the_innermost_text_config_wins_over_every_other_branch_and_over_the_roots(config: Any) -> None:
    assert text_value(config, "hidden_size") > 0
    assert list(text_branch(config))[-1] is config


@given(configs)
def test_the_root_is_as_before_afterwards(config: Any) -> None:
    before = dict(vars(config))

    def build() -> None:
        with text_hidden_size(config):
            assert config.hidden_size > 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    assert vars(config) == before


def test_a_config_without_any_is_not_touched() -> None:
    config = SimpleNamespace(vision_config=SimpleNamespace(hidden_size=3))
    with text_hidden_size(config):
        assert not hasattr(config, "hidden_size")
    assert text_value(config, "hidden_size") is None


def test_a_config_that_is_its_own_text_config_ends() -> None:
    config = SimpleNamespace(hidden_size=1)
    config.text_config = config
    assert list(text_branch(config)) == [config]


def test_branches_that_say_nothing_are_passed_over() -> None:
    """A dict, as code on the Hub leaves one, a config without a theta, and one whose theta is None."""
    asked = []

    def original(hf_config: Any) -> Any:
        asked.append(hf_config)
        if isinstance(hf_config, dict):
            raise AttributeError("no theta")
        return hf_config.rope_theta

    nope, none = SimpleNamespace(), SimpleNamespace(rope_theta=None)
    config = SimpleNamespace(text_config={"rope_theta": 5}, thinker_config=nope, language_config=none, rope_theta=7)
    assert find_rope_theta(original, config) == 7
    assert asked == [{"rope_theta": 5}, nope, none, config]
    assert find_rope_theta(original, hf_config=none) is None
