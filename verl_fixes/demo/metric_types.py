"""Which types a real ``TrainingWorker._postprocess_output`` hands to the driver; one JSON line.

Without fixes when ``VERL_FIXES=0`` is set: ``-m verl_fixes...`` imports the package, which activates them otherwise.
"""

from __future__ import annotations

import json

from verl_fixes.demo import fsdp_on_cpu


def main() -> None:
    """Postprocess the metrics of a Megatron-like engine, in which everything is a tensor."""
    import torch

    worker = fsdp_on_cpu.training_worker()
    metrics = {
        "grad_norm": torch.tensor([0.3], dtype=torch.bfloat16),
        "lr": torch.tensor(1e-6),
        "actor/entropy": [torch.tensor(1.5), torch.tensor(1.25)],
    }
    reported = fsdp_on_cpu.postprocess(worker, metrics)
    print(json.dumps({name: _type_of(reported[name]) for name in metrics}))


def _type_of(value: object) -> str:
    if isinstance(value, list):
        return f"list of {_type_of(value[0])}"
    return type(value).__name__


if __name__ == "__main__":
    main()
