"""Multimodal models get their RoPE base and the size of their value head from the text branch of their config.

What goes wrong: a Hugging Face config of a multimodal model keeps ``hidden_size`` and the RoPE base in a config inside
it: ``text_config``, for Qwen-Omni ``thinker_config.text_config``, for others ``language_config`` or ``llm_config``.
verl up to 0.9.0 looks at the root and at ``text_config`` only, the root first. Every Megatron-Bridge run of such a
model, actor or critic, stops with an AttributeError about ``hidden_size``; on verl 0.8.0 every Megatron run does,
about ``rope_theta``. Where the root has a RoPE base of its own, for another branch, the model gets that one. The value
head that trl makes for the FSDP critic has the same problem on 0.7.x, with ``text_config`` as well.

What the wrappers do: ask the text branch first and the root last. Branches for audio and vision, talkers and codecs,
which have the same attributes with other values, are never asked. ``get_hf_rope_theta`` is called with each config of
the text branch. Where ``hidden_size`` is read from the root, the root has the text branch's for as long as the model is
built, and is as before afterwards: it is saved with every checkpoint.

When it can go: with verl 0.9.1.
Source: https://github.com/verl-project/verl/pull/7805
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl_fixes.arguments import Call
from verl_fixes.patch import Patch, Target
from verl_fixes.probe import Function, Source, Verdict, mentions

_BRANCHES = ("text_config", "thinker_config", "language_config", "llm_config")
_UTILS = "verl.utils.megatron_utils"


def text_branch(config: Any) -> Iterator[Any]:
    """The configs that may describe the language model, the innermost first, ``config`` itself last."""
    for name in _BRANCHES:
        inner = getattr(config, name, None)
        if inner is not None and inner is not config:
            yield from text_branch(inner)
    yield config


def text_value(config: Any, name: str) -> Any:
    """An attribute as the text branch has it, None where no part of it has it."""
    values = (getattr(part, name, None) for part in text_branch(config))
    return next((value for value in values if value is not None), None)


@contextmanager
def text_hidden_size(config: Any) -> Iterator[None]:
    """Let ``config.hidden_size`` be the text branch's for a while."""
    size = text_value(config, "hidden_size")
    if size == getattr(config, "hidden_size", None):
        yield
        return
    attribute = getattr(config, "attribute_map", {}).get("hidden_size", "hidden_size")  # transformers writes to that
    before = {name: value for name, value in vars(config).items() if name == attribute}
    config.hidden_size = size
    try:
        yield
    finally:
        vars(config).pop(attribute, None)
        vars(config).update(before)


def find_rope_theta(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``get_hf_rope_theta(hf_config)``, which looks into ``rope_parameters`` of transformers 5, too."""
    call = Call(original, ("hf_config",), args, kwargs)
    *inner, _ = text_branch(call["hf_config"])
    for config in inner:
        try:
            theta = call(hf_config=config)
        except AttributeError:  # how it says that this config has none
            continue
        if theta is not None:
            return theta
    return call()


def size_megatron_value_head(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``make_megatron_module(wrap_config, tf_config, hf_config, bridge=None, provider=None, ...)``.

    It reads ``hidden_size`` for Megatron-Bridge, whether a value head is wanted or not.
    """
    call = Call(original, ("wrap_config", "tf_config", "hf_config", "bridge", "provider"), args, kwargs)
    if call.get("provider") is None or hasattr(call["hf_config"], "text_config"):
        return call()
    with text_hidden_size(call["hf_config"]):
        return call()


def size_trl_value_head(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code)``.

    trl takes the size from the model's own config, which transformers copies from ``model_config``.
    """
    call = Call(original, ("local_path", "torch_dtype", "model_config"), args, kwargs)
    with text_hidden_size(call["model_config"]):
        return call()


def _theta_verdict(function: Function, source: Source) -> Verdict:
    if not mentions(function, "rope_theta"):
        return Verdict.DRIFTED
    if source.says(_UTILS, "thinker_config"):
        return Verdict.FIXED
    return Verdict.BUGGY if mentions(function, "text_config") else Verdict.DRIFTED


def _module_verdict(function: Function, source: Source) -> Verdict:
    if not mentions(function, "make_value_model"):
        return Verdict.DRIFTED
    if mentions(function, "get_hf_config_attr"):
        return Verdict.FIXED
    return Verdict.BUGGY if mentions(function, "hidden_size") else Verdict.DRIFTED


def _trl_verdict(function: Function, source: Source) -> Verdict:
    if not mentions(function, "AutoModelForCausalLMWithValueHead"):
        return Verdict.DRIFTED
    return Verdict.FIXED if mentions(function, "hidden_size") else Verdict.BUGGY


PATCH = Patch(
    name="hf-text-config",
    title="RoPE base and value head size of multimodal models",
    hurts=(
        "Models whose Hugging Face config has the language model's settings deeper inside (thinker_config of "
        "Qwen-Omni, language_config, llm_config) stop at start with an AttributeError about hidden_size with "
        "Megatron-Bridge, actor or critic, and about rope_theta on verl 0.8.0. A RoPE base that the root has for "
        "another branch is taken for the language model's. On 0.7.x the FSDP critic of models with a text_config "
        "cannot size trl's value head."
    ),
    does=(
        "Lets get_hf_rope_theta, make_megatron_module and load_valuehead_model read rope_theta, rope_parameters and "
        "hidden_size from the text branch first and from the root last, and never from audio or vision branches."
    ),
    removable="With verl 0.9.1.",
    upstream=("https://github.com/verl-project/verl/pull/7805",),
    fixed_in="0.9.1",
    atomic=False,
    targets=(
        Target(
            module=_UTILS,
            qualname="get_hf_rope_theta",
            wrapper=find_rope_theta,
            question=_theta_verdict,
            exists=lambda source: source.says(_UTILS, "get_hf_rope_theta"),
            absent="this release reads hf_config.rope_theta where it needs it, for text models",
            known={
                "82b8f84403db23d9": Verdict.BUGGY,  # 0.8.0, 0.9.0
                "6184e17d968fc87d": Verdict.FIXED,  # 0.9.1
            },
        ),
        Target(
            module=_UTILS,
            qualname="make_megatron_module",
            wrapper=size_megatron_value_head,
            question=_module_verdict,
            known={
                "e5ab3805bc0c2c43": Verdict.BUGGY,  # 0.7.0
                "e80a91bfbe07477a": Verdict.BUGGY,  # 0.7.1
                "2cb73e78f0cedb00": Verdict.BUGGY,  # 0.8.0
                "7cf39addc99d5e5a": Verdict.BUGGY,  # 0.9.0
                "ac204c0db5169c28": Verdict.FIXED,  # 0.9.1
            },
        ),
        Target(
            module="verl.utils.model",
            qualname="load_valuehead_model",
            wrapper=size_trl_value_head,
            question=_trl_verdict,
            known={
                "76e110aed97ef579": Verdict.BUGGY,  # 0.7.0
                "77820f8435626af9": Verdict.BUGGY,  # 0.7.1
                "329440bb790cbc9d": Verdict.FIXED,  # 0.8.0, 0.9.0
                "827f0ec43be7de02": Verdict.FIXED,  # 0.9.1
            },
        ),
    ),
)
