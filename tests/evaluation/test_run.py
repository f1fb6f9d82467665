"""Evaluations: resumed after a kill, reused by content, aggregated, and called from a recipe."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from sigmerge.cli.evaluation_lines import evaluation_lines
from sigmerge.cli.show import description_lines
from sigmerge.errors import OutputError, PoolError, ScoreError, SigmergeError, SigmergeWarning
from sigmerge.evaluation import splits
from sigmerge.evaluation.aggregate import standard_error, summarise
from sigmerge.evaluation.answers import Scored
from sigmerge.evaluation.how import How
from sigmerge.evaluation.run import evaluate as run
from sigmerge.evaluation.sources import Data
from sigmerge.evaluation.suite import load_suite
from sigmerge.files.checksums import sealed
from sigmerge.jobs.aggregate import aggregate
from sigmerge.jobs.evaluate import EvaluateJob
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import suite_scorer
from sigmerge.method.deficit import residual_gaps
from sigmerge.probing.generate import Sampling, load_model
from tests.command_line import sigmerge
from tests.evaluation.scored import evaluate
from tests.evaluation.tiny import write_tiny
from tests.forks import Fork, command
from tests.kept_entries import another_cache, kept_answers

LENGTH = """
import json, sys
for line in open(sys.argv[1]):
    row = json.loads(line)
    print(json.dumps({"id": row["id"], "even": 1 - len(row["prompt"]) % 2}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint and a suite of two domains, one of them scored by a program."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_tiny(folder / "tiny")
    rows = [{"prompt": f"{'x' * i} is {i}", "answer": str(i)} for i in range(120)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "length.py").write_text(LENGTH)
    command = f"{sys.executable} length.py {{items}}"
    suite = {
        "name": "own",
        "calibration_items": 20,
        "domains": {
            "words": {
                "said": {
                    "harness": "jsonl",
                    "files": "words.jsonl",
                    "matcher": "regex",
                    "answer": "answer",
                    "max_new_tokens": 3,
                }
            },
            "length": {
                "even": {
                    "harness": "command",
                    "files": "words.jsonl",
                    "command": command,
                    "metrics": {"odd": {"key": "even", "better": "lower"}},
                }
            },
        },
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(suite))
    return folder


def test_an_evaluation_and_its_reuse(place: Path, tmp_path: Path):
    how = {"out": tmp_path / "out.json"}
    first = evaluate(place / "tiny", str(place / "own.yaml"), "calibration", **how)
    assert first["items"] == {"said": 20, "even": 20}
    assert first["macro"] == pytest.approx(sum(first["domains"].values()) / 2)
    assert first["usage_of_run"]["generated_tokens"] > 0
    assert json.loads((tmp_path / "out.json").read_text()) == sealed(first)
    again = evaluate(place / "tiny", str(place / "own.yaml"), "calibration", **how)
    assert again["reused_items"] == 40
    assert again["usage_of_run"]["calls"] == 0
    assert again["usage_of_results"] == first["usage_of_results"]
    assert (again["domains"], again["benchmarks"]) == (first["domains"], first["benchmarks"])


def test_the_splits_of_an_evaluation_are_disjoint(place: Path, tmp_path: Path):
    items = {}
    for split in ("calibration", "evaluation", "all"):
        with another_cache(tmp_path / split):
            evaluate(place / "tiny", str(place / "own.yaml"), split, only=("even",))
            items[split] = set(kept_answers())
    assert [len(ids) for ids in items.values()] == [20, 96, 120]
    assert not items["calibration"] & items["evaluation"]
    assert items["calibration"] | items["evaluation"] < items["all"]


def test_killed_and_resumed_equals_uninterrupted(place: Path, tmp_path: Path):
    """SIGKILL half-way; the same command then scores only what is missing."""
    words = ["evaluate", place / "tiny", "--suite", place / "own.yaml", "--split", "all",
             "--benchmark", "said", "--json"]  # fmt: skip
    child = Fork(lambda: command(*words))
    while child.at_work() and len(kept_answers()) < 16:
        time.sleep(0.002)
    child.killed()
    before = kept_answers()
    assert 16 <= len(before) < 120
    resumed = sigmerge(*words).json
    assert resumed["reused_items"] == len(before)
    found = kept_answers()
    with another_cache(tmp_path / "whole"):
        expected = evaluate(place / "tiny", str(place / "own.yaml"), "all", only=("said",))
        assert found == kept_answers()
    assert resumed["benchmarks"] == expected["benchmarks"]
    for key in ("calls", "prompt_tokens", "generated_tokens"):
        assert resumed["usage_of_results"][key] == expected["usage_of_results"][key]


def test_programs_need_permission(tmp_path: Path):
    problem = {"task_id": "x", "prompt": "def f():", "entry_point": "f", "base_input": [],
               "plus_input": [], "canonical_solution": " return 1", "atol": 0}  # fmt: skip
    (tmp_path / "p.jsonl").write_text((json.dumps(problem) + "\n") * 5)
    mark = {"harness": "code", "dataset": "humaneval", "files": "p.jsonl",
            "metrics": {"pass@1": "pass@1"}}  # fmt: skip
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"name": "s", "domains": {"c": {"p": mark}}}))
    with pytest.raises(SigmergeError, match="--allow-code-execution"):
        evaluate(tmp_path, str(tmp_path / "s.yaml"), "all")
    (tmp_path / "p.jsonl").write_text('{"prompt": "def f():"}\n')
    with pytest.raises(ScoreError, match="the record all/0 has no 'task_id'"):
        evaluate(tmp_path, str(tmp_path / "s.yaml"), "all",
                 allow_code=True)  # fmt: skip


def test_domain_and_macro_are_unweighted_means():
    """Two benchmarks of different sizes weigh the same, and so do domains; lists are pooled."""
    suite = load_suite("mergebench")
    results = {
        "ifeval": [
            Scored({m.key: v for m in suite.benchmarks["ifeval"].metrics.values()})
            for v in ([1.0, 1.0, 0.0], [0.0])
        ],
        "m_arc": [Scored({"acc_norm,none": 1.0})] * 3,
        "m_mmlu": [Scored({"acc,none": 0.0})],
        "harmbench": [Scored({"harm": 1.0}, judge="keyword"), Scored({"harm": 0.0})],
    }
    found = summarise(suite, results)
    assert found.domains == {"instruction": 0.5, "multilingual": 0.5, "safety": 0.5}
    assert found.macro == 0.5
    assert found.judges == ["keyword"]
    assert found.missing["math"] == ["gsm8k"]
    assert found.missing["safety"] == ["wildguardtest", "xstest", "do_anything_now"]


def test_item_scores_have_the_mean_and_the_spread_of_the_score():
    """Of plain items those of numpy; of items with lists the spread that resampling items has."""
    suite = load_suite("mergebench")
    rng = np.random.default_rng(0)
    plain = rng.integers(0, 2, 60).astype(float).tolist()
    found = summarise(suite, {"harmbench": [Scored({"harm": v}) for v in plain]})
    assert found.item_scores["safety"] == [[1.0 - v for v in plain]]
    error = standard_error(found.item_scores["safety"])
    assert error == pytest.approx(np.std(plain, ddof=1) / np.sqrt(60))
    lists = [rng.integers(0, 2, rng.integers(1, 4)).astype(float).tolist() for _ in range(200)]
    keys = [m.key for m in suite.benchmarks["ifeval"].metrics.values()]
    found = summarise(suite, {"ifeval": [Scored(dict.fromkeys(keys, v)) for v in lists]})
    (items,) = found.item_scores["instruction"]
    assert np.mean(items) == pytest.approx(found.domains["instruction"])
    drawn = [[lists[i] for i in rng.integers(0, 200, 200)] for _ in range(2000)]
    resampled = np.std([np.mean(np.concatenate(each)) for each in drawn])
    assert standard_error([items]) == pytest.approx(resampled, rel=0.1)
    both = standard_error([items, found.item_scores["instruction"][0]])
    assert both == pytest.approx(standard_error([items]) / np.sqrt(2))


def test_items_that_agree_leave_the_doubt_of_one_item():
    assert standard_error([[1.0] * 100]) == pytest.approx(0.01)
    assert standard_error([[1.0]]) is None


def test_residual_gaps_are_to_the_strongest_expert():
    experts = {"a": {"x": 0.5, "y": 0.9}, "b": {"x": 0.7, "y": 0.1}}
    gaps = residual_gaps(experts, {"x": 0.6, "y": 0.95})
    assert gaps == {"x": pytest.approx(0.1), "y": 0.0}


def test_aggregate_refuses_what_cannot_be_compared(place: Path, tmp_path: Path):
    files = []
    for split in ("calibration", "all"):
        out = tmp_path / f"{split}.json"
        evaluate(place / "tiny", str(place / "own.yaml"), split,
                 out=out, only=("even",))  # fmt: skip
        files.append(out)
    rows = aggregate(files[:1], {"words": files[0]}).rows
    assert rows[0].residual_gaps == {"length": 0.0}
    assert rows[0].submetrics == {"even.odd": rows[0].domains["length"]}
    with pytest.raises(ScoreError, match=r"all\.json: its split 'all', of .*'calibration'"):
        aggregate(files)
    with pytest.raises(ScoreError, match=r"all\.json: its split 'all', of .*'calibration'"):
        aggregate(files[:1], {"words": files[1]})


@pytest.mark.parametrize(
    ("key", "value"),
    [("suite", "other"), ("limit", 2), ("judges", ["keyword"]), ("items", {"b": 3}),
     ("items_sha256", "f"), ("settings_sha256", "f")],
)  # fmt: skip
def test_an_expert_measured_otherwise_is_refused(tmp_path: Path, key: str, value: object):
    result = {"checkpoint": "c", "suite": "s", "split": "evaluation", "limit": None, "judges": [],
              "items": {"b": 9}, "items_sha256": "0", "settings_sha256": "0",
              "domains": {"d": 0.5}, "macro": 0.5, "benchmarks": {"b": {"m": 0.5}}}  # fmt: skip
    row, expert = tmp_path / "row.json", tmp_path / "expert.json"
    row.write_text(json.dumps(sealed(result)))
    expert.write_text(json.dumps(sealed({**result, key: value})))
    assert aggregate([row], {"d": row}).rows[0].residual_gaps == {"d": 0.0}
    assert aggregate([row]).as_json()["rows"][0]["limit"] is None
    with pytest.raises(ScoreError, match=rf"expert\.json: its {key} "):
        aggregate([row], {"d": expert})
    expert.write_text(json.dumps(sealed({k: v for k, v in result.items() if k != key})))
    with pytest.raises(ScoreError, match=rf"no whole result .* lacks {key}\."):
        aggregate([row], {"d": expert})


def test_a_damaged_result_is_not_aggregated(place: Path, tmp_path: Path):
    file = tmp_path / "out.json"
    evaluate(place / "tiny", str(place / "own.yaml"), only=("even",), out=file)
    assert aggregate([file]).rows[0].domains == {"length": json.loads(file.read_text())["macro"]}
    file.write_text(file.read_text().replace('"length": 0.', '"length": 0.1', 1))
    with pytest.raises(ScoreError, match="is damaged"):
        aggregate([file])


def test_results_of_other_settings_are_not_compared(place: Path, tmp_path: Path):
    """The items are the same, and the models were asked in other words."""
    files = []
    for number, prompt in enumerate(("{prompt}", "Say: {prompt}")):
        shutil.copyfile(place / "words.jsonl", tmp_path / "words.jsonl")
        mark = {"harness": "jsonl", "files": "words.jsonl", "prompt": prompt, "max_new_tokens": 1}
        text = yaml.safe_dump({"name": "own", "domains": {"words": {"said": mark}}})
        (tmp_path / "own.yaml").write_text(text)
        files.append(tmp_path / f"{number}.json")
        evaluate(place / "tiny", str(tmp_path / "own.yaml"), limit=2, out=files[-1])
    with pytest.raises(ScoreError, match="its settings_sha256"):
        aggregate(files)


def test_a_recipe_measures_with_a_suite(place: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path))
    scorer = suite_scorer({"suite": "own.yaml", "limit": 5}, "calibration", place, Options())
    assert set(scorer(place / "tiny").scores) == {"words", "length"}
    with pytest.raises(ScoreError, match="limits: is not known"):
        suite_scorer({"suite": "own.yaml", "limits": 5}, "calibration", place, Options())


def _facts(folder: Path, answer: str) -> None:
    rows = [{"prompt": f"p{i}", "answer": answer} for i in range(10)]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_recipe_sees_that_the_records_changed(place: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    mark = {"harness": "jsonl", "files": "q.jsonl", "matcher": "regex", "max_new_tokens": 2}
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({"name": "q", "domains": {"d": {"b": mark}}}))
    found = []
    for answer in ("^never said$", ".*"):
        _facts(tmp_path, answer)
        scorer = suite_scorer({"suite": "q.yaml"}, "calibration", tmp_path, Options())
        found.append(scorer(place / "tiny").scores)
    assert found == [{"d": 0.0}, {"d": 1.0}]


def test_a_journal_of_calls_knows_the_records_and_settings_of_its_suite(
    place: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(place, tmp_path / "place")
    place, words = tmp_path / "place", tmp_path / "place/words.jsonl"

    def identity(**more: object) -> object:
        scorer = suite_scorer({"suite": "own.yaml", **more}, "calibration", place, Options())
        return scorer.by(place / "tiny")

    scorer = suite_scorer({"suite": "own.yaml"}, "calibration", place, Options())
    scorer(place / "tiny")
    first = identity()
    assert identity() == first
    assert identity(limit=5) != first != identity(dtype="bfloat16")
    assert scorer.by(place / "none") == first  # a dry run reads no weights for it
    suite = (place / "own.yaml").read_text()
    (place / "own.yaml").write_text(suite.replace("  length:", "  lengths:"))
    assert identity() != first
    (place / "own.yaml").write_text(suite)
    words.write_text(words.read_text().replace("is", "was"))
    assert identity() != first
    with pytest.raises(ScoreError, match="its records changed between two checkpoints"):
        scorer(place / "tiny")


def test_another_program_scores_again(place: Path, tmp_path: Path):
    _facts(tmp_path, "x")
    command = f"{sys.executable} score.py --from={{items}} --config=c.json"
    mark = {"harness": "command", "files": "q.jsonl", "command": command, "metrics": {"m": "m"}}
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({"name": "q", "domains": {"d": {"b": mark}}}))
    (tmp_path / "score.py").write_text(
        "import json, sys\n"
        "value = json.load(open('c.json'))\n"
        "for line in open(sys.argv[1].removeprefix('--from=')):\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'm': value}))\n"
    )
    found = []
    for value, more in ((0.25, ""), (0.5, ""), (0.5, "# another script\n")):
        (tmp_path / "c.json").write_text(json.dumps(value))
        with (tmp_path / "score.py").open("a") as script:
            script.write(more)
        result = evaluate(place / "tiny", str(tmp_path / "q.yaml"), "all")
        found.append((result["macro"], result["reused_items"]))
    assert found == [(0.25, 0), (0.5, 0), (0.5, 0)]


def test_scores_of_a_program_that_is_edited_meanwhile_are_not_remembered(
    place: Path, tmp_path: Path
):
    shutil.copyfile(place / "words.jsonl", tmp_path / "q.jsonl")
    mark = {"harness": "command", "files": "q.jsonl", "metrics": {"m": "m"},
            "command": f"{sys.executable} score.py {{items}}"}  # fmt: skip
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({"name": "q", "domains": {"d": {"b": mark}}}))
    script = "import json, sys\nfor line in open(sys.argv[1]):\n    "
    script += "print(json.dumps({'id': json.loads(line)['id'], 'm': 1}))\n"
    for _ in range(2):
        (tmp_path / "score.py").write_text(script + "open(__file__, 'a').write('# edited')\n")
        with pytest.warns(SigmergeWarning, match="Its scores are not remembered"):
            found = evaluate(place / "tiny", str(tmp_path / "q.yaml"))
        assert found["reused_items"] == 0


def test_a_checkpoint_that_changes_while_it_is_scored_is_not_remembered(
    place: Path, tmp_path: Path
):
    model, other = tmp_path / "model", write_tiny(tmp_path / "other", seed=1)
    shutil.copytree(place / "tiny", model)
    weights = model / "model.safetensors"
    with another_cache(tmp_path / "wanted"):
        wanted = evaluate(model, str(place / "own.yaml"))

    def exchanged(*_: object) -> None:
        weights.write_bytes((other / weights.name).read_bytes())

    with pytest.raises(PoolError, match="changed while it was read"):
        evaluate(model, str(place / "own.yaml"), progress=exchanged)
    shutil.copyfile(place / "tiny" / weights.name, weights)
    again = evaluate(model, str(place / "own.yaml"))
    assert (again["reused_items"], again["benchmarks"]) == (0, wanted["benchmarks"])


def test_answers_are_written_and_named(place: Path, tmp_path: Path):
    """All items of a run, also those that were kept; and the command line says where."""
    file = tmp_path / "new/answers.jsonl"
    how = {"answers": file}
    found = evaluate(place / "tiny", str(place / "own.yaml"), "all", limit=2, **how)
    assert f"answers: {file}" in "\n".join(evaluation_lines(found, file))
    assert "pass --answers FILE" in "\n".join(evaluation_lines(found))
    evaluate(place / "tiny", str(place / "own.yaml"), "all", **how)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    items, _ = splits.load_available(load_suite(place / "own.yaml"), Data())
    assert sorted((row["benchmark"], row["record"]["prompt"]) for row in rows) == sorted(
        (name, item.record["prompt"]) for name, each in items.items() for item in each
    )
    said = [row for row in rows if row["benchmark"] == "said"]
    assert said and all(isinstance(row["output"], str) for row in said)
    model = load_model(place / "tiny", "hf", "auto", None)
    sampling = Sampling(load_suite(place / "own.yaml").benchmarks["said"].max_new_tokens)
    ((answer,), _) = model.generate([said[0]["record"]["prompt"]], sampling)
    assert said[0]["output"] == answer[0]
    with pytest.raises(OutputError, match=r"--answers: .* cannot be written"):
        evaluate(place / "tiny", str(place / "own.yaml"), "all",
                 answers=tmp_path)  # fmt: skip


def test_a_split_file_with_fewer_benchmarks_is_told(place: Path, tmp_path: Path):
    suite = load_suite(place / "own.yaml")
    items, _ = splits.load_available(suite, Data())
    file = tmp_path / "splits.json"
    splits.write(splits.build(suite, {"even": items["even"]}), file)
    how = {"splits": file}
    found = evaluate(place / "tiny", str(place / "own.yaml"), "calibration", **how)
    assert list(found["domains"]) == ["length"]
    text = "\n".join(evaluation_lines(found))
    assert "without: said" in text
    assert f"left out: said: {file} does not have it." in text


def test_a_benchmark_without_data_is_named_and_strict_refuses_it(place: Path, tmp_path: Path):
    """Its domain is the mean of the other; the result names what is missing, by domain."""
    _facts(tmp_path, ".*")
    here = {"harness": "jsonl", "files": "q.jsonl", "matcher": "regex", "max_new_tokens": 2}
    lost = {"harness": "jsonl", "files": "lost.jsonl"}
    marks = {"d": {"here": here, "lost": lost}, "e": {"gone": lost}}
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({"name": "q", "domains": marks}))
    found = run(place / "tiny", tmp_path / "q.yaml", "calibration", How())
    assert found.domains == {"d": 1.0}
    assert found.missing == {"d": ["lost"], "e": ["gone"]}
    assert set(found.absent) == {"lost", "gone"}
    assert found.as_json()["missing"] == found.missing
    with pytest.raises(ScoreError, match="--strict wants all") as error:
        run(place / "tiny", tmp_path / "q.yaml", "calibration", How(strict=True))
    assert len(error.value.problems) == 2 and "lost.jsonl" in error.value.problems[0]
    wanted = How(strict=True, only=("here",))
    assert run(place / "tiny", tmp_path / "q.yaml", "calibration", wanted).domains == {"d": 1.0}


def test_a_split_without_items_is_refused(place: Path, tmp_path: Path):
    (tmp_path / "q.jsonl").write_text('{"prompt": "p", "answer": "a"}\n' * 4)
    mark = {"harness": "jsonl", "files": "q.jsonl"}
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({"name": "q", "domains": {"d": {"b": mark}}}))
    with pytest.raises(ScoreError, match="calibration split has no item"):
        evaluate(place / "tiny", str(tmp_path / "q.yaml"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"limit": 0}, "limit: 0 is no count"),
        ({"limit": True}, "limit: True is no count"),
        ({"batch_size": -1}, "batch_size: -1 is no count"),
        ({"dtype": "float8"}, "dtype: 'float8' is not known; there are auto"),
        ({"backend": "jax"}, "backend: 'jax' is not known"),
    ],
)
def test_wrong_settings_are_told(tmp_path: Path, how: dict, words: str):
    with pytest.raises(ScoreError, match=words):
        evaluate(tmp_path, "nano", **how)


@pytest.mark.parametrize("limit", [0, -3, True])
def test_a_recipes_limit_is_a_count(tmp_path: Path, limit: int):
    with pytest.raises(ScoreError, match=r"limit: \S+ is (too small|no int)"):
        suite_scorer({"suite": "nano", "limit": limit}, "calibration", tmp_path, Options())


@pytest.mark.parametrize("value", ["nan", "57.0", "-0.5", "inf", "'1'", "None"])
def test_a_programs_scores_are_fractions(place: Path, tmp_path: Path, value: str):
    _facts(tmp_path, "x")
    mark = {"harness": "command", "files": "q.jsonl", "metrics": {"m": "m"},
            "command": f"{sys.executable} score.py {{items}}"}  # fmt: skip
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({"name": "q", "domains": {"d": {"b": mark}}}))
    (tmp_path / "score.py").write_text(
        "import json, sys\nfrom math import nan, inf\nfor line in open(sys.argv[1]):\n"
        f"    print(json.dumps({{'id': json.loads(line)['id'], 'm': {value}}}))\n"
    )
    with pytest.raises(ScoreError, match="is no number from 0 to 1"):
        evaluate(place / "tiny", str(tmp_path / "q.yaml"), "all")


def test_what_cannot_be_written_or_judged_is_told_first(tmp_path: Path):
    """Neither the checkpoint nor the records exist: both errors come before they are looked for."""
    nothing = tmp_path / "no checkpoint"
    with pytest.raises(OutputError, match=r"--out: .* cannot be written; it is a folder"):
        evaluate(nothing, "mergebench", out=tmp_path, data=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"--out: .* cannot be written"):
        evaluate(nothing, "mergebench", out=tmp_path / "file/out.json", data=tmp_path)
    with pytest.raises(ScoreError, match="--judge: 'no judge' is neither"):
        evaluate(nothing, "mergebench", judge="no judge", data=tmp_path)


@pytest.mark.parametrize("flag", ["out", "answers"])
def test_a_file_that_no_evaluation_wrote_is_not_replaced(place: Path, tmp_path: Path, flag: str):
    """Such as a configuration, or a device; what an earlier evaluation wrote is."""
    own = place / "own.yaml"
    written = {"out": tmp_path / "result.json", "answers": tmp_path / "answers.jsonl"}
    for _ in range(2):
        evaluate(place / "tiny", str(own), "all", limit=1, **written)
    foreign = tmp_path / "config.json"
    os.mkfifo(tmp_path / "fifo")
    other = "answers" if flag == "out" else "out"
    for file, content in ((foreign, "{}"), (foreign, "years of work"), (tmp_path / "fifo", None),
                          (written[other], None)):  # fmt: skip
        if content is not None:
            file.write_text(content)
        with pytest.raises(OutputError, match=f"--{flag}: .* no evaluation wrote it"):
            evaluate(tmp_path / "no checkpoint", str(own), **{flag: file})
    assert foreign.read_text() == "years of work"


def test_a_program_that_prints_no_text_is_told(place: Path, tmp_path: Path):
    _facts(tmp_path, "x")
    mark = {"harness": "command", "files": "q.jsonl", "metrics": {"m": "m"},
            "command": "printf '\\377'"}  # fmt: skip
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({"name": "q", "domains": {"d": {"b": mark}}}))
    with pytest.raises(ScoreError, match="its command must print a line"):
        evaluate(place / "tiny", str(tmp_path / "q.yaml"), "all")


def test_records_that_do_not_fit_a_task_are_told(place: Path, tmp_path: Path):
    pytest.importorskip("lm_eval")
    _facts(tmp_path, "x")
    mark = {"harness": "lm_eval", "task": "gsm8k_cot", "files": "q.jsonl",
            "metrics": {"m": "exact_match,flexible-extract"}}  # fmt: skip
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({"name": "q", "domains": {"d": {"b": mark}}}))
    with pytest.raises(ScoreError, match=r"gsm8k_cot does not fit its records .*they have prompt"):
        evaluate(place / "tiny", str(tmp_path / "q.yaml"), "all")


def test_a_dry_run_loads_no_model_and_makes_no_folder(place: Path, tmp_path: Path):
    out = tmp_path / "new/deep/result.json"
    how = How()
    job = EvaluateJob(place / "tiny", str(place / "own.yaml"), "calibration", how, out)
    described = job.describe()
    weights = (place / "tiny/model.safetensors").stat().st_size
    assert 0 < described.bytes_to_read <= weights < described.peak_memory_bytes
    assert described.evaluation_calls == 1
    assert list(tmp_path.iterdir()) == []
    assert sum(described.steps[0].items.values()) > 0
    text = "\n".join(description_lines(described))
    assert "on the calibration split of own" in text and not set("{}[]'") & set(text)
