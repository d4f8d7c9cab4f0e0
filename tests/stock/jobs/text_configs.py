"""RoPE bases and value heads of this release for configurations as transformers makes them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.stock.jobs.phases import phases
from verl_fixes.demo import cpu_platform
from verl_fixes.probe import locate

TEXT = {"hidden_size": 96, "rope_theta": 5678.0, "num_attention_heads": 8, "num_hidden_layers": 1}
OTHER = {"hidden_size": 48, "rope_theta": 9.0}


class RemoteConfig(PretrainedConfig):
    """As code on the Hub makes them: parts under names of its own, and a RoPE base for its image tokens."""

    model_type = "remote"

    def __init__(self, branch: str = "language_config", root: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        setattr(self, branch, CONFIG_MAPPING["qwen2"](**TEXT))
        self.vision_config = PretrainedConfig(**OTHER)
        self.audio_config = PretrainedConfig(**OTHER)
        for name, value in (root or {}).items():
            setattr(self, name, value)


def configs() -> dict[str, PretrainedConfig]:
    def make(kind: str, **kwargs: Any) -> PretrainedConfig:
        return CONFIG_MAPPING[kind](**copy.deepcopy(kwargs))

    omni = {"thinker_config": {"text_config": TEXT, "audio_config": {"d_model": 32}}, "talker_config": OTHER}
    moe_omni = {**omni, "talker_config": {"text_config": OTHER}}
    return {
        "qwen2": make("qwen2", **TEXT),
        "llama": make("llama", **TEXT),
        "qwen2_5_vl": make("qwen2_5_vl", text_config=TEXT, vision_config={"hidden_size": 48}),
        "qwen3_vl": make("qwen3_vl", text_config=TEXT, vision_config={"hidden_size": 48}),
        "internvl": make("internvl", text_config={"model_type": "qwen2", **TEXT}, vision_config={"hidden_size": 48}),
        "llava": make("llava", text_config={"model_type": "llama", **TEXT}, vision_config={"hidden_size": 48}),
        "qwen2_5_omni": make("qwen2_5_omni", **omni),
        "qwen3_omni_moe": make("qwen3_omni_moe", **moe_omni),
        "language_config": RemoteConfig(),
        "language_config, root has both": RemoteConfig(root={"rope_theta": 3.0, "hidden_size": 24}),
        "text_config, root has a theta": RemoteConfig("text_config", root={"rope_theta": 3.0}),
        "llm_config": RemoteConfig("llm_config"),
        "no theta": PretrainedConfig(hidden_size=96),
    }


def attempt(measure: Callable[[], Any]) -> Any:
    try:
        return measure()
    except AttributeError as error:
        return f"AttributeError: {error}"


def thetas() -> Any:
    """``get_hf_rope_theta`` under the three names by which verl reaches it; None before 0.8.0."""
    from verl.models.mcore import config_converter, model_initializer
    from verl.utils import megatron_utils

    if not hasattr(megatron_utils, "get_hf_rope_theta"):
        return None
    answers = {}
    for name, config in configs().items():
        found = [
            attempt(lambda where=where, config=config: where.get_hf_rope_theta(config))
            for where in (megatron_utils, config_converter, model_initializer)
        ]
        assert found[0] == found[1] == found[2]
        answers[name] = found[0]
    return answers


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    vars(module).update(attributes)
    return module


@contextmanager
def megatron_bridge() -> Any:
    """Stand-ins for the names that verl imports from Megatron-Bridge, which is not installed.

    The value head is verl's own where verl has one; 0.8.0 takes it from Megatron-Bridge.
    """

    def make_value_model(hidden_size: int, sequence_parallel: bool) -> Callable[..., None]:
        return lambda chunks: setattr(chunks[0], "output_layer", torch.nn.Linear(hidden_size, 1))

    mapping = SimpleNamespace(register_module_type=lambda *_: None)
    classes = {"CanonicalLoRA": object, "DoRA": object, "LoRA": object, "VLMLoRA": object}
    modules = [
        _module("megatron.bridge", AutoBridge=object),
        *(_module(f"megatron.bridge.{name}") for name in ("models", "models.conversion", "peft", "training")),
        _module("megatron.bridge.models.conversion.param_mapping", AutoMapping=mapping),
        *(_module(f"megatron.bridge.peft.{name}", **classes) for name in ("canonical_lora", "dora", "lora")),
        _module("megatron.bridge.peft.utils", create_peft_hook=None, load_peft_adapter_checkpoint=None),
        _module("megatron.bridge.training.utils"),
        _module("megatron.bridge.training.utils.config_utils", create_ddp_config=lambda **_: None),
    ]
    source = locate("verl")
    if source is not None and source.function("verl.models.mcore.bridge", "make_value_model") is None:
        value_head = dict.fromkeys(("LinearForLastLayer", "freeze_moe_router"), None)
        name = "megatron.bridge.training.utils.train_utils"
        modules.append(_module(name, make_value_model=make_value_model, **value_head))
    with mock.patch.dict(sys.modules, {module.__name__: module for module in modules}):
        yield


class Provider:
    """Megatron-Bridge's provider as far as ``make_megatron_module`` uses it: one chunk, and the registered hooks."""

    sequence_parallel = fp16 = bf16 = False

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_pre_wrap_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def provide_distributed_model(self, **_: Any) -> list[torch.nn.Module]:
        chunk = torch.nn.Module()
        chunk.config = SimpleNamespace()
        for hook in self.hooks:
            hook([chunk])
        return [chunk]


def megatron_value_heads() -> Any:
    """Input size of the head that ``make_megatron_module`` makes with a provider, and what it left on the config."""
    from megatron.core import parallel_state
    from verl.utils.megatron_utils import McoreModuleWrapperConfig, make_megatron_module

    def head(config: PretrainedConfig, value_model: bool) -> Any:
        wrap = McoreModuleWrapperConfig(is_value_model=value_model, wrap_with_ddp=False)
        made = make_megatron_module(wrap, SimpleNamespace(), config, bridge=object(), provider=Provider())
        chunk = (made[0] if isinstance(made, tuple) else made)[0]
        return chunk.output_layer.in_features if value_model else "built"

    answers = {}
    with (
        megatron_bridge(),
        mock.patch.object(parallel_state, "get_pipeline_model_parallel_world_size", return_value=1),
        mock.patch.object(parallel_state, "is_pipeline_last_stage", return_value=True),
    ):
        for name, config in configs().items():
            before = config.to_dict()
            critic = attempt(lambda config=config: head(config, True))
            actor = attempt(lambda config=config: head(config, False))
            after = config.to_dict()
            changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
            answers[name] = [critic, actor, sorted(changed - {"rope_theta"})]  # verl itself puts the theta there
    return answers


def trl_value_heads() -> Any:
    """Input size of the head that trl makes for the FSDP critic in ``load_valuehead_model``.

    Neither trl nor weights are here: trl's ``from_pretrained`` is a stand-in that reads ``config.hidden_size`` as
    trl's ``ValueHead`` does, the model an object with a copy of the config, as transformers makes one.
    """
    import transformers
    from verl.utils import model as verl_model

    class WithValueHead(torch.nn.Module):
        @classmethod
        def from_pretrained(cls, pretrained: Any) -> Any:
            made = cls()
            made.pretrained_model = pretrained
            made.v_head = torch.nn.Linear(pretrained.config.hidden_size, 1)
            return made

    def load(config: Any = None, **_: Any) -> Any:
        pretrained = torch.nn.Module()
        pretrained.config = copy.deepcopy(config)
        return pretrained

    def refuse(**_: Any) -> Any:
        raise ValueError("Unrecognized configuration class")

    trl = _module("trl", AutoModelForCausalLMWithValueHead=WithValueHead)
    names = ("AutoModelForCausalLM", "AutoModelForVision2Seq", "AutoModelForImageTextToText")
    autos = {getattr(transformers, name) for name in names if hasattr(transformers, name)}
    answers = {}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {"trl": trl}))
        stack.enter_context(mock.patch.object(verl_model, "is_trl_available", return_value=True))
        stack.enter_context(mock.patch.object(transformers.AutoModelForTokenClassification, "from_pretrained", refuse))
        for auto in autos:
            stack.enter_context(mock.patch.object(auto, "from_pretrained", load))
        for name, config in configs().items():
            before = config.to_dict()

            def head(config: Any = config) -> int:
                loaded = verl_model.load_valuehead_model("-", torch.float32, config, False)
                return int(loaded.v_head.in_features)

            answers[name] = [attempt(head), config.to_dict() == before]
    return answers


def answers() -> dict[str, Any]:
    cpu_platform.arrange()
    kinds = {"theta": thetas, "megatron": megatron_value_heads, "trl": trl_value_heads}
    return {name: phases(measure) for name, measure in kinds.items()}
