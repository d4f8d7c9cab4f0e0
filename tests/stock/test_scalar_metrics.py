"""scalar-metrics on the real TrainingWorker: field cases 1 (verl#6195) and 3."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.processes import call
from tests.stock.conftest import RELEASE

JOBS = "tests.stock.jobs.metrics"
FIXED: dict[str, Any] = {
    "grad_norm": "float 0.25",
    "lr": "float 0.5",
    "replicated": ["float 1.5"],
    "sharded": ["float 2.5"],
    "attached": ["float 4.0"],
    "list": [["float 1.0", "float 2.0", "float 3.0"]],
    "nested": [{"pair": ["int 4", "bool True"], "text": "kept"}],
    "histogram": ["Tensor torch.float32 [3.0, 3.0]"],
    "plain": ["float 5.0"],
}
if RELEASE != "0.7.0":  # it has no Metric
    FIXED |= {
        "metric": [{"Metric": ["max", ["float 1.0", "float 2.0"]]}],
        "live metric": [{"Metric": ["mean", ["float 1.0", "float 2.0"]]}],
    }


@pytest.fixture(scope="module")
def answer() -> Any:
    return call(f"{JOBS}:reported")


def test_stock_sends_tensors_to_the_driver(answer: Any, release: str) -> None:
    for phase in ("stock", "back"):
        driver = answer[phase]["driver"]
        if release < "0.8":
            assert driver["grad_norm"] == "Tensor torch.bfloat16 [0.25]"
        assert driver["lr"] == "Tensor torch.float32 0.5"
        assert driver["list"] == [["Tensor torch.float32 1.0", "float 2.0", "float32 float32 3.0"]]
        assert driver["histogram"] == ["Tensor torch.float32 attached [3.0, 3.0]"]
        assert answer[phase]["storages on the wire"] > 0


def test_with_the_fix_everything_is_plain_on_every_release(answer: Any) -> None:
    assert answer["fixed"]["driver"] == FIXED
    assert answer["fixed"]["storages on the wire"] == 0
    assert answer["fixed"]["input mutated"] is False


def test_metrics_are_plain_before_they_are_gathered(answer: Any) -> None:
    unpacked = {key: value[0] for key, value in FIXED.items() if key not in ("grad_norm", "lr")}
    assert answer["fixed"]["gathered"] == unpacked
    assert answer["stock"]["gathered"] != unpacked


def test_the_rest_of_the_output_is_what_stock_computes(answer: Any) -> None:
    assert answer["fixed"]["loss"] == answer["stock"]["loss"] == answer["back"]["loss"]
    plain = call(f"{JOBS}:numbers_only")
    assert plain["stock"] == plain["fixed"] == plain["back"]


def test_overrides_in_subclasses(release: str) -> None:
    answer = call(f"{JOBS}:override")
    assert answer["stock"] == answer["back"] == ["Tensor"] * 4
    assert answer["fixed"] == ["float"] * 4


def test_a_dtensor_is_put_together_only_where_all_of_its_processes_take_part() -> None:
    with socket.socket() as probe, ThreadPoolExecutor(2) as pool:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        jobs = [pool.submit(call, f"{JOBS}:on_some_ranks", timeout=90, rank=rank, port=port) for rank in (0, 1)]
        answers = [job.result() for job in jobs]
    assert [answer["together"] for answer in answers] == [[1.5, 2.0, [0.0, 1.0]]] * 2
    assert answers[0]["alone"] == [1.5, True, True]


@pytest.mark.skipif(RELEASE >= "0.8", reason="this release has no legacy workers")
def test_the_learning_rate_of_the_legacy_megatron_workers() -> None:
    answer = call("tests.stock.jobs.metrics:legacy_learning_rate")
    assert answer == {"stock": "Tensor", "fixed": "float", "back": "Tensor"}
