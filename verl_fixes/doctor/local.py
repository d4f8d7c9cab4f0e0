"""What can be told from the environment, the metadata and the source files of this machine. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

from verl_fixes import probe, propagation, toggles
from verl_fixes.doctor import packages
from verl_fixes.doctor.findings import Finding, error, info, ok, warning
from verl_fixes.patch import INSTALLED, TROUBLE, State
from verl_fixes.records import Record
from verl_fixes.router_replay_settings import engine_cannot_record

ROUTER_LOSS_LINK = "https://github.com/NVIDIA/Megatron-LM/pull/5047"
ROUTER_LOSS_PATCH = "moe-aux-scale"
COUNTS_PATCH = "per-token-loss"


def route(environ: Mapping[str, str]) -> list[Finding]:
    """How the plugin gets into a process that imports verl, with this environment."""
    check = "route"
    source = probe.locate("verl")
    if source is None:
        return [error(check, "verl is not installed", "Install verl in this environment, or run doctor in verl's.")]
    names = environ.get(propagation.EXTERNAL_MODULES, "").split(",")
    for name in names:  # verl does not strip them
        if name != propagation.PACKAGE and name.strip() == propagation.PACKAGE:
            way_out = f"Set {propagation.EXTERNAL_MODULES} without blanks."
            return [error(check, f"{propagation.EXTERNAL_MODULES} names {name!r}; verl will not find it", way_out)]
    if propagation.PACKAGE in names:
        return [ok(check, f"{propagation.EXTERNAL_MODULES} names {propagation.PACKAGE}")]
    return [_by_plugin(environ) if propagation.verl_loads_plugins() else _by_hand()]


_RUN = "put `verl-fixes run --` before the command"
_VARIABLE = f"set {propagation.EXTERNAL_MODULES}={propagation.PACKAGE}"


def _by_hand() -> Finding:
    message = (
        "this verl loads no plugin by itself, and nothing names verl_fixes: no process of a job is reached, Ray "
        "workers included, unless its program imports verl_fixes"
    )
    return warning("route", message, f"Either {_RUN}, or {_VARIABLE}.")


def _by_plugin(environ: Mapping[str, str]) -> Finding:
    if excluded := propagation.excluded_by(environ):
        way_out = f"Either add verl_fixes to {propagation.EXTERNAL_PLUGINS}, or {_VARIABLE}."
        return warning("route", f"{excluded} keeps verl from loading this plugin", way_out)
    if not any(point.name == propagation.PACKAGE for point in metadata.entry_points(group="verl.plugins")):
        message = "verl_fixes can be imported, but is not installed: verl finds no entry point of it"
        return warning("route", message, f"Either run `pip install verl-fixes`, or {_VARIABLE}.")
    return ok("route", "verl finds verl_fixes by its entry point")


def versions() -> list[Finding]:
    """The packages that decide what a fix meets, and where they come from."""
    findings = []
    for name in packages.PACKAGES:
        package = packages.installed(name)
        found = f"{name} {package.version} in {package.folder}" if package else f"{name} is not installed"
        findings.append(info("versions", found))
    return findings


def patches(records: Sequence[Record]) -> list[Finding]:
    """The state of every patch. What waits for a module that was not imported is not called in order."""
    return [_patch(record) for record in records]


def _patch(record: Record) -> Finding:
    check = f"patch {record.name}"
    if record.state in TROUBLE or record.expected in TROUBLE:
        state = record.state if record.state in TROUBLE else record.expected
        reasons = [t.reason for t in record.targets if t.state in TROUBLE or t.expected in TROUBLE]
        way_out = f"Run `verl-fixes explain {record.name}`. {record.env}=0 runs without this fix."
        message = f"{state}: {'; '.join(dict.fromkeys(reasons))}"
        return error(check, message, way_out, next(iter(record.upstream), ""))
    waiting = [target for target in record.targets if target.state is State.PENDING]
    if record.state in INSTALLED and not waiting:
        return ok(check, f"{record.state}: {record.reason}")
    message = f"{record.state}: {record.reason}"
    if waiting:
        modules = ", ".join(dict.fromkeys(target.module for target in waiting))
        message += f"; not checked: {modules}, which was not imported here"
    return info(check, message)


def switches(environ: Mapping[str, str]) -> list[Finding]:
    """The variables that are set, and the patches that are off."""
    check = "switches"
    present = {name: environ[name] for name in sorted(environ) if name.startswith(toggles.ALL)}
    findings = [info(check, f"{name}={value}") for name, value in present.items()]
    return findings or [info(check, f"no {toggles.ALL} variable is set: defaults")]


def router_losses(records: Sequence[Record]) -> list[Finding]:
    """megatron-core up to 0.18.2 with calculate_per_token_loss and TP x CP > 1."""
    check = "router losses"
    core = packages.installed(packages.MEGATRON_CORE)
    if core is None:
        return [info(check, "not checked: megatron-core is not installed")]
    version = packages.numbers(core.version)
    if not version:
        return [info(check, f"not checked: megatron-core {core.version}", link=ROUTER_LOSS_LINK)]
    if version >= (0, 19, 0):
        return [ok(check, f"megatron-core {core.version} scales the MoE aux and z loss")]
    ours = next((record for record in records if record.name == ROUTER_LOSS_PATCH), None)
    counts = next((record for record in records if record.name == COUNTS_PATCH), None)
    if ours is not None and ours.expected in INSTALLED and counts is not None and counts.state is State.DISABLED:
        message = (
            f"{COUNTS_PATCH} is off: {ROUTER_LOSS_PATCH} acts only where verl reports token counts by itself (0.9)"
        )
        return [warning(check, message, f"Set {counts.env}=1.")]
    if ours is not None and ours.expected in INSTALLED:
        return [ok(check, f"megatron-core {core.version}; {ROUTER_LOSS_PATCH} scales the MoE aux and z loss")]
    message = (
        f"megatron-core {core.version} leaves the MoE aux and z loss too small by the factor TP x CP when "
        "calculate_per_token_loss is on. Only MoE models with a router loss and TP x CP > 1 are hit"
    )
    way_out = "Take megatron-core 0.19.0 or later, or multiply the coefficients of the router losses by TP x CP."
    if ours is not None:
        way_out = f"Set {ours.env}=1. {way_out}"
    return [warning(check, message, way_out, ROUTER_LOSS_LINK)]


def multi_token_prediction() -> list[Finding]:
    """What is known to be wrong with MTP training and is not fixed here. docs/megatron-core.md has the numbers."""
    check = "multi-token prediction"
    verl, megatron = probe.locate("verl"), probe.locate("megatron")
    if verl is None or verl.file(_MTP) is None:
        return []
    findings = []
    if not verl.says("verl.models.mcore.model_forward", "_build_mtp_loss_mask_nested"):
        message = (
            "this verl shifts the response mask of MTP in PPO: it trains on prompt tokens as well (137 tokens instead "
            "of 129 in our batch). SFT is right. With calculate_per_token_loss the legacy workers also weigh its loss "
            "too little, by response tokens / all tokens"
        )
        findings.append(warning(check, message, "Take verl 0.8.0 or later, or set mtp.enable_train=False."))
    if verl.says(_MTP, _OF_EACH_RANK) or (megatron is not None and megatron.says(_MEGATRON_MTP, _OF_EACH_RANK)):
        message = (
            "with calculate_per_token_loss and CP>1, each context parallel rank weighs its MTP loss by its own tokens "
            "before and after the shift, although tokens only move to a neighbour: about one token per sequence"
        )
        findings.append(info(check, message))
    return findings


_MTP = "verl.models.mcore.mtp_patch"
_MEGATRON_MTP = "megatron.core.transformer.multi_token_prediction"
_OF_EACH_RANK = "original_num_tokens"


def router_replay() -> list[Finding]:
    """verl 0.7.1's Megatron engine records routes with a function that returns one value more than it expects."""
    check = "router replay"
    verl = probe.locate("verl")
    why = engine_cannot_record(verl) if verl else ""
    if not why:
        return []
    message = (
        "router replay cannot work with this verl's Megatron engine (trainer.use_legacy_worker_impl=disable): "
        f"{why}, and the first record fails"
    )
    way_out = (
        "Keep router_replay.mode=disabled there, or run it through the legacy workers "
        "(trainer.use_legacy_worker_impl=auto), or take verl 0.8.0 or later."
    )
    return [warning(check, message, way_out)]
