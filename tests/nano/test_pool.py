"""The shipped pool: whole, small, in the regime it was made for, and scored as its log says."""

from __future__ import annotations

import pytest

from sigmerge.evaluation.run import nano_scores
from sigmerge.nano import files
from sigmerge.nano.facts import NANO_DOMAINS, PROBES, build_all
from sigmerge.nano.files import LOG, MEMBERS, POOL, PROBE, REFERENCE


def logged(split: str) -> dict[str, dict[str, float]]:
    records = files.read_lines(POOL / LOG)
    return {r["member"]: r["scores"] for r in records if r.get("split") == split}


def test_sums_hold_and_the_size_is_bounded() -> None:
    assert files.verify() == 47
    assert sum(path.stat().st_size for path in files.contents()) < 20e6


def test_it_is_the_pool_of_its_seed() -> None:
    seed = files.read_lines(POOL / LOG)[0]["seed"]
    assert seed == 0
    for name, domain in build_all(seed).items():
        assert tuple(files.load_items("evaluation", name)) == domain.evaluation


def test_probes_are_not_items() -> None:
    probes = {record["prompt"] for record in files.read_lines(POOL / PROBE)}
    assert len(probes) == PROBES * len(NANO_DOMAINS)
    for domain in NANO_DOMAINS:
        for split in files.NANO_SPLITS:
            assert probes.isdisjoint(item.prompt for item in files.load_items(split, domain))


@pytest.mark.parametrize("member", MEMBERS)
def test_members_score_as_the_log_says(member: str) -> None:
    assert nano_scores(POOL / member, "calibration") == pytest.approx(
        logged("calibration")[member], abs=1e-12
    )


def test_experts_know_their_domain_and_the_reference_about_half() -> None:
    scores = logged("evaluation")
    for domain in NANO_DOMAINS:
        assert scores[domain][domain] > 0.98
        for other in set(NANO_DOMAINS) - {domain}:
            assert abs(scores[other][domain] - scores[REFERENCE][domain]) < 0.05
    assert 0.45 < scores[REFERENCE]["math"] < 0.65
    assert 0.45 < scores[REFERENCE]["multilingual"] < 0.65
