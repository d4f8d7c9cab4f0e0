"""Names the operators that vllm-ascend's ``init_batch_invariance`` registers. A program: imports nothing of verl_fixes.

It is given to ``python -`` on stdin, in a process of its own: what is registered with torch stays registered.
"""

from __future__ import annotations

import importlib
import json
from typing import Any


def main() -> None:
    """Call the real function with this process's VLLM_BATCH_INVARIANT, and print the names as one JSON list."""
    import torch

    importlib.import_module("torch_npu")
    ascend = importlib.import_module("vllm_ascend.batch_invariant")
    names: list[str] = []
    register = torch.library.Library.impl

    def noted(library: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(str(name))
        return register(library, name, *args, **kwargs)

    torch.library.Library.impl = noted
    ascend.init_batch_invariance()
    print(json.dumps(names), flush=True)


if __name__ == "__main__":
    main()
