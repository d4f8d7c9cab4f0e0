"""The arithmetic of resume-warmup, and which code it takes for which."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_fixes.patches.resume_warmup import PATCH, missing_prompts
from verl_fixes.probe import Source, Verdict

sizes = st.integers(1, 64)


@given(st.integers(-1, 5) | st.floats(0, 5), sizes, sizes, st.integers(0, 400))
def test_missing_prompts(batches: float, train_batch_size: int, gen_batch_size: int, restored: int) -> None:
    target, missing = missing_prompts(batches, train_batch_size, gen_batch_size, restored)
    assert target % gen_batch_size == 0
    assert missing % gen_batch_size == 0
    assert 0 <= target <= max(0, batches) * train_batch_size
    assert 0 <= missing <= max(0, target - restored) < missing + gen_batch_size


@pytest.mark.parametrize(
    "restored, missing", [(0, 16), (1, 12), (4, 12), (5, 8), (12, 4), (13, 0), (16, 0), (17, 0), (99, 0)]
)
def test_missing_prompts_in_fours(restored: int, missing: int) -> None:
    assert missing_prompts(2, 8, 4, restored) == (16, missing)


LOOP = """
class PPOTrainerColocateAsync:
    def on_train_begin(self):
        if self.config.skip.rollout_tq.enable:
            return
        for _ in range(self.config.trainer.v1.colocate_async.num_warmup_batches):
            self._add_batch_to_generate()
        logger.info("added")
"""
HELPER = """
class PPOTrainerColocateAsync:
    def on_train_begin(self):
        self._add_async_warmup_batches(self.config.trainer.v1.colocate_async.num_warmup_batches)
"""
BASE = """
class PPOTrainer:
    def _add_async_warmup_batches(self, num_warmup_batches):
        missing = math.floor(num_warmup_batches * 8 / 4) * 4 - self._restored_tq_prompt_count
        self._add_prompts_to_generate(missing)
"""


@pytest.mark.parametrize(
    "trainer, base, verdict",
    [
        (LOOP, "", Verdict.BUGGY),
        (LOOP.replace('logger.info("added")', "self.prefetch()"), "", Verdict.DRIFTED),
        (LOOP.replace("_add_batch_to_generate", "_add_half_a_batch"), "", Verdict.DRIFTED),
        (HELPER, BASE, Verdict.INCOMPLETE),
        (HELPER, BASE.replace("generate(missing)", "generate(missing - missing % 4)"), Verdict.FIXED),
        (HELPER, BASE.replace("self._add_prompts", "missing -= missing % 4\n        self._add_prompts"), Verdict.FIXED),
        (HELPER, BASE.replace("_restored_tq_prompt_count", "_other_count"), Verdict.DRIFTED),
        (HELPER, "", Verdict.DRIFTED),
        (HELPER + "        self.prefetch()\n", BASE, Verdict.DRIFTED),
    ],
)
def test_the_question(tmp_path: Path, trainer: str, base: str, verdict: Verdict) -> None:
    folder = tmp_path / "verl" / "trainer" / "ppo" / "v1"
    folder.mkdir(parents=True)
    (folder / "trainer_colocate_async.py").write_text(trainer)
    (folder / "trainer_base.py").write_text(base)
    source = Source((tmp_path / "verl",))
    (target,) = (t for t in PATCH.targets if "colocate" in t.module)
    function = source.function(target.module, target.qualname)
    assert function is not None
    assert target.question is not None
    assert target.question(function, source) is verdict
