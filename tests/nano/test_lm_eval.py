"""The same items through lm-evaluation-harness: the same answer to every one of them."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from sigmerge.nano.facts import NANO_DOMAINS
from sigmerge.nano.files import POOL
from tests.nano.measure import answers

TASKS = Path(__file__).parents[2] / "src" / "sigmerge" / "nano" / "lm_eval"
LIMIT = 20


@pytest.mark.parametrize("split", ["calibration", "evaluation"])
def test_the_harness_agrees_item_by_item(split: str) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    folder = POOL / "reference"
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=[f"nano_{split}"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        limit=LIMIT,
        batch_size=32,
        device="cpu",
        bootstrap_iters=0,
    )
    ours = answers(folder, split, limit=LIMIT)
    theirs = {
        sample["doc"]["id"]: (sample["filtered_resps"][0], bool(sample["exact_match"]))
        for domain in NANO_DOMAINS
        for sample in found["samples"][f"nano_{domain}_{split}"]
    }
    assert theirs == ours
    macro = found["results"][f"nano_{split}"]["exact_match,none"]
    assert macro == pytest.approx(fmean(right for _, right in ours.values()))
