"""A dataset of numbered prompts, named in the config by ``data.custom_cls``."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset


class NumberedPrompts(Dataset):
    """Row ``i`` is ``{"raw_prompt": ..., "index": i}``; verl's own loaders and collate function do the rest."""

    def __init__(self, **_: Any) -> None:
        pass

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": [{"role": "user", "content": str(index)}], "index": index}
