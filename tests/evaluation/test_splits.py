"""Splits: the paper's counts on records of the true numbers, and changes that verify catches."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigmerge.errors import OutputError, ScoreError
from sigmerge.evaluation import splits
from sigmerge.evaluation.sources import Data, Item
from sigmerge.evaluation.suite import load_suite
from sigmerge.jobs import splits as verb
from tests.evaluation.data import DATA, needs_data

LANGUAGES = {
    "m_mmlu": {"fr": 13091, "es": 13334, "de": 13258, "ru": 13007},
    "m_arc": {"fr": 1169, "es": 1170, "de": 1169, "ru": 1169},
    "m_hellaswag": {"fr": 9338, "es": 9374, "de": 9368, "ru": 9272},
}
PAPER = {
    "gsm8k": (263, 1056),
    "ifeval": (108, 433),
    "humaneval_plus": (32, 132),
    "mbpp_plus": (75, 303),
    "m_mmlu": (10538, 42152),
    "m_arc": (935, 3742),
    "m_hellaswag": (7470, 29882),
    "wildguardtest": (149, 600),
    "harmbench": (64, 256),
    "xstest": (90, 360),
    "do_anything_now": (60, 240),
}
DRAWN = {
    "gsm8k": 100,
    "ifeval": 100,
    "humaneval_plus": 30,
    "mbpp_plus": 70,
    "m_mmlu": 56,
    "m_arc": 5,
    "m_hellaswag": 39,
    "wildguardtest": 41,
    "harmbench": 18,
    "xstest": 25,
    "do_anything_now": 16,
}


@pytest.fixture(scope="module")
def full():
    """The split of all eleven benchmarks, on empty records of the true counts."""
    suite = load_suite("mergebench")
    items = {}
    for name, mark in suite.benchmarks.items():
        parts = LANGUAGES.get(name, {"all": mark.records})
        items[name] = [Item(part, i, {}) for part, count in parts.items() for i in range(count)]
    return splits.build(suite, items)


def test_the_papers_counts(full):
    marks = full["benchmarks"]
    assert {n: (len(m["calibration"]), len(m["evaluation"])) for n, m in marks.items()} == PAPER
    assert {n: len(m["drawn"]) for n, m in marks.items()} == DRAWN
    assert full["totals"] == {
        "records": 98_940,
        "calibration": 19_784,
        "evaluation": 79_156,
        "drawn": 500,
    }
    for mark in marks.values():
        assert not set(mark["calibration"]) & set(mark["evaluation"])
        assert set(mark["drawn"]) <= set(mark["calibration"])


def test_languages_are_one_population(full):
    """Each language has about a fifth of its own records in calibration."""
    for name, counts in LANGUAGES.items():
        calibration = full["benchmarks"][name]["calibration"]
        for part, count in counts.items():
            share = sum(i.startswith(f"{part}/") for i in calibration) / count
            assert abs(share - 0.2) < 0.04


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=6), st.integers(1, 300))
def test_largest_remainder_is_proportional(sizes: list[int], total: int):
    seats = splits.largest_remainder(sizes, total)
    assert sum(seats) == min(total, sum(sizes))
    assert all(0 <= seat <= size for seat, size in zip(seats, sizes, strict=True))
    if total < sum(sizes):
        exact = [total * size / sum(sizes) for size in sizes]
        assert all(abs(seat - x) < 1 for seat, x in zip(seats, exact, strict=True))


SUITE = {
    "name": "own",
    "calibration_items": 3,
    "domains": {"law": {"bar": {"harness": "jsonl", "files": "bar.jsonl"}}},
}


def _own(folder: Path, count: int = 20) -> dict:
    rows = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(count)]
    (folder / "bar.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = load_suite(SUITE)
    items, _ = splits.load_available(suite, Data(folder))
    return splits.build(suite, items)


def test_verify_accepts_what_build_wrote(tmp_path: Path):
    content = _own(tmp_path)
    assert splits.verify(content, load_suite(SUITE), Data(tmp_path)) == []
    assert [len(content["benchmarks"]["bar"][k]) for k in ("calibration", "drawn")] == [4, 3]


def test_verify_catches_a_changed_source(tmp_path: Path):
    content = _own(tmp_path)
    file = tmp_path / "bar.jsonl"
    file.write_text(file.read_text().replace("a7", "a8"))
    problems = splits.verify(content, load_suite(SUITE), Data(tmp_path))
    assert problems == ["bar: the source data of all changed (1 of 20 records, first all/7)"]
    _own(tmp_path, 19)
    problems = splits.verify(content, load_suite(SUITE), Data(tmp_path))
    assert problems == ["bar: the source data of all changed (20 records, now 19)"]


def test_verify_catches_a_changed_membership(tmp_path: Path):
    content = _own(tmp_path)
    mark = content["benchmarks"]["bar"]
    mark["calibration"][3], mark["evaluation"][0] = mark["evaluation"][0], mark["calibration"][3]
    problems = splits.verify(content, load_suite(SUITE), Data(tmp_path))
    assert any("changed after" in text for text in problems)
    assert any("not the one that the seed gives" in text for text in problems)
    mark["evaluation"].append(mark["calibration"][0])
    problems = splits.verify(content, load_suite(SUITE), Data(tmp_path))
    assert any("overlap" in text for text in problems)


def test_wildguard_keeps_labelled_harmful_prompts(tmp_path: Path):
    """WildGuardTest is gated; its loader is tested on a file of the same columns."""
    labels = ("prompt_harm_label", "response_harm_label", "response_refusal_label")
    rows = [
        {"prompt": str(i), **dict(zip(labels, values, strict=True))}
        for i, values in enumerate(
            [
                ("harmful", "unharmful", "refusal"),
                ("unharmful", "unharmful", "compliance"),
                (None, "harmful", "compliance"),
                ("harmful", None, "compliance"),
                ("harmful", "harmful", "compliance"),
            ]
        )
    ]
    (tmp_path / "wildguardtest").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "wildguardtest/test.jsonl").write_text(text)
    suite = load_suite("mergebench")
    mark = suite.benchmarks["wildguardtest"]
    items = mark.load("wildguardtest", Data(tmp_path), suite.folder)
    assert [item.record["prompt"] for item in items] == ["0", "4"]
    assert [item.id for item in items] == ["all/0", "all/1"]


@needs_data
def test_the_local_files_have_the_papers_counts(tmp_path: Path):
    file = tmp_path / "splits.json"
    result = verb.build("mergebench", file, data=DATA)
    complete = {n: r["records"] for n, r in result["benchmarks"].items() if r["complete"]}
    suite = load_suite("mergebench")
    assert complete == {name: suite.benchmarks[name].records for name in complete}
    assert {"gsm8k", "ifeval", "humaneval_plus", "mbpp_plus", "m_arc", "xstest"} <= set(complete)
    assert verb.verify("mergebench", file, data=DATA)["sha256"] == result["sha256"]


SHIPPED = Path(__file__).parents[2] / "docs/results/splits.json.xz"
"""Members and sums of the benchmarks that anyone may redistribute and that are complete."""


@pytest.fixture
def shipped(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "splits.json"
    file.write_bytes(lzma.decompress(SHIPPED.read_bytes()))
    return splits.read(file)


def test_the_shipped_members_are_the_papers(shipped: dict[str, Any], tmp_path: Path) -> None:
    """Whole by themselves: counts, sums of every member, the seed's own digest of the file."""
    assert splits.verify(shipped, load_suite("mergebench"), Data(tmp_path)) == []
    marks = shipped["benchmarks"]
    assert all(mark["complete"] for mark in marks.values())
    counts = {n: (len(m["calibration"]), len(m["evaluation"])) for n, m in marks.items()}
    assert counts == {name: PAPER[name] for name in marks} and len(counts) == 8


@needs_data
def test_the_shipped_sums_are_those_of_the_files(shipped: dict[str, Any]) -> None:
    assert splits.verify(shipped, load_suite("mergebench"), Data(DATA)) == []
    shipped["benchmarks"]["xstest"]["sums"]["all/3"] = "0" * 64
    problems = splits.verify(_signed(shipped), load_suite("mergebench"), Data(DATA))
    assert problems == ["xstest: the sum of all/3 is another"]


@needs_data
def test_the_shipped_members_are_what_its_command_builds(
    shipped: dict[str, Any], tmp_path: Path
) -> None:
    """Beside records of benchmarks that the file leaves out, a sample of mMMLU for one."""
    page = (SHIPPED.parent / "evaluation.md").read_text(encoding="utf-8")
    [words] = re.findall(r"^    sigmerge splits build members.json((?:.*\\\n)*.*)", page, re.M)
    only = re.findall(r"--benchmark (\w+)", words)
    file = tmp_path / "members.json"
    built = verb.build("mergebench", file, data=DATA, only=only)
    assert splits.read(file) == shipped and [*built["benchmarks"]] == only
    assert verb.verify("mergebench", file, data=DATA)["absent"] == {}


def test_a_file_of_some_benchmarks_says_which(tmp_path: Path) -> None:
    _own(tmp_path)
    two = {name: {"harness": "jsonl", "files": f"{name}.jsonl"} for name in ("bar", "inn")}
    suite = tmp_path / "suite.yaml"
    suite.write_text(json.dumps({**SUITE, "domains": {"law": two}}))
    file = tmp_path / "some.json"
    verb.build(str(suite), file, data=tmp_path, only=["bar"])
    assert splits.read(file)["only"] == ["bar"]
    assert [*verb.verify(str(suite), file, data=tmp_path)["benchmarks"]] == ["bar"]
    with pytest.raises(ScoreError, match="bar"):
        verb.build(str(suite), tmp_path / "no.json", data=tmp_path, only=["barr"])
    with pytest.raises(ScoreError, match="not all of these benchmarks have their records here"):
        verb.build(str(suite), tmp_path / "no.json", data=tmp_path, only=["bar", "inn"])
    (tmp_path / "inn.jsonl").write_text((tmp_path / "bar.jsonl").read_text())
    verb.verify(str(suite), file, data=tmp_path)
    whole = {key: value for key, value in splits.read(file).items() if key != "only"}
    splits.write(_signed(whole), file)
    with pytest.raises(ScoreError, match="do not hold") as found:
        verb.verify(str(suite), file, data=tmp_path)
    assert any("inn: is missing, though" in text for text in found.value.problems)


def _signed(content: dict) -> dict:
    """A split file whose own sum is right whatever else is not."""
    plain = {key: value for key, value in content.items() if key != "sha256"}
    return {**plain, "sha256": splits._digest(plain)}


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize(
    ("key", "change", "words"),
    [
        ("drawn", lambda ids: [*ids[:-1], ids[0]], "drawn items are not the first 3"),
        ("drawn", lambda ids: ids[:-1], "drawn items are not the first 3"),
        ("drawn", lambda ids: ids[::-1], "drawn items are not the first 3"),
        ("domain", lambda _: "other", "its domain is law"),
        ("complete", lambda _: False, "complete: False is wrong of 20 records"),
        ("records", lambda _: 21, "the sources do not sum to the records"),
        ("sums", lambda sums: {**sums, "all/99": ""}, "sums are of other ids than the members"),
    ],
)
def test_verify_derives_everything_again(tmp_path: Path, here: bool, key: str, change, words: str):
    content = _own(tmp_path)
    mark = content["benchmarks"]["bar"]
    mark[key] = change(mark[key])
    data = Data(tmp_path if here else tmp_path / "elsewhere")
    problems = splits.verify(_signed(content), load_suite(SUITE), data)
    assert any(words in text for text in problems)


def test_verify_checks_all_totals(tmp_path: Path):
    content = _own(tmp_path)
    content["totals"]["records"] += 1
    problems = splits.verify(_signed(content), load_suite(SUITE), Data(tmp_path))
    assert problems == ["the totals are not the sums over the benchmarks"]


def test_verify_misses_a_benchmark_whose_records_are_here(tmp_path: Path):
    more = {"harness": "jsonl", "files": "more.jsonl"}
    both = {**SUITE, "domains": {**SUITE["domains"], "art": {"more": more}}}
    (tmp_path / "own.yaml").write_text(json.dumps(both))
    _own(tmp_path)
    file, suite = tmp_path / "splits.json", str(tmp_path / "own.yaml")
    assert list(verb.build(suite, file)["absent"]) == ["more"]
    assert list(verb.verify(suite, file)["absent"]) == ["more"]
    (tmp_path / "more.jsonl").write_text((tmp_path / "bar.jsonl").read_text())
    with pytest.raises(ScoreError, match="more: is missing, though its records are here"):
        verb.verify(suite, file)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (("totals",), "totals: the numbers records"),
        (("benchmarks", "bar"), "bar: a mapping"),
        (("benchmarks", "bar", "drawn"), r"bar\.drawn: a list of ids"),
        (("benchmarks", "bar", "sources"), r"bar\.sources: the records and sha256"),
    ],
)
def test_a_damaged_split_file_is_told(tmp_path: Path, place: tuple[str, ...], words: str):
    content = _own(tmp_path)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = [1]
    splits.write(content, tmp_path / "s.json")
    with pytest.raises(ScoreError, match=words):
        splits.read(tmp_path / "s.json")


def test_verify_says_what_fails(tmp_path: Path):
    with pytest.raises(ScoreError, match="no such split file"):
        verb.verify("mergebench", tmp_path / "none.json")


def test_another_seed_divides_all_records_anew_and_verifies(tmp_path: Path):
    """Also those of a source that brings its own splits: the nano pool's."""
    suite, data = load_suite("nano"), Data()
    verb.build("nano", tmp_path / "own.json")
    verb.build("nano", tmp_path / "zero.json", seed=0)
    verb.build("nano", tmp_path / "one.json", seed=1)
    own, zero, one = (splits.read(tmp_path / f"{n}.json") for n in ("own", "zero", "one"))
    for content in (own, zero, one):
        assert splits.verify(content, suite, data) == []
    calibration = [set(c["benchmarks"]["nano_math"]["calibration"]) for c in (own, zero, one)]
    assert len({frozenset(ids) for ids in calibration}) == 3
    records = own["benchmarks"]["nano_math"]["records"]
    assert [len(ids) for ids in calibration[1:]] == [records // splits.SHARE] * 2
    one["seed"] = 2
    assert any(
        "not the one that the seed gives" in text for text in splits.verify(one, suite, data)
    )


def test_no_other_file_and_no_other_division_is_replaced(tmp_path: Path):
    file, foreign = tmp_path / "splits.json", tmp_path / "thesis.txt"
    made = verb.build("nano", file, seed=1)
    before = file.read_bytes()
    assert verb.build("nano", file, seed=1) == made
    with pytest.raises(OutputError, match="holds another division"):
        verb.build("nano", file, seed=2)
    foreign.write_text("mine")
    with pytest.raises(ScoreError, match=r"thesis\.txt"):
        verb.build("nano", foreign)
    assert (file.read_bytes(), foreign.read_text()) == (before, "mine")
