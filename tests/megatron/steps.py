"""Starts tests.megatron.job in a gloo group and compares gradients as vectors."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.processes import environment
from verl_fixes.demo import megatron_on_cpu
from verl_fixes.doctor.packages import numbers

MEGATRON_CORE = numbers(metadata.version("megatron-core"))
"""The installed release, as a tuple."""


@dataclass(frozen=True)
class Steps:
    """What the job answered, and the gradients of every phase, engine and case."""

    answers: dict[str, Any]
    gradients: dict[str, dict[str, torch.Tensor]]

    def gradient(self, phase: str, engine: str, case: str) -> torch.Tensor:
        """The whole gradient as one vector, parameters sorted by name."""
        return megatron_on_cpu.flatten(self.gradients[f"{phase}/{engine}/{case}"])


def steps(
    folder: Path, world_size: int, plan: dict[str, Any], timeout: float = 280, job: str = "tests.megatron.job"
) -> Steps:
    """Run every case of every engine of the plan in three phases."""
    file = folder / "gradients.pt"
    printed = megatron_on_cpu.run(
        job,
        world_size,
        [json.dumps(plan), os.fspath(file)],
        fixes=True,
        timeout=timeout,
        env=environment(),
    )
    return Steps(json.loads(printed.splitlines()[-1]), torch.load(file))


def relative_error(gradient: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64."""
    return float((gradient.double() - reference.double()).norm() / reference.double().norm())
