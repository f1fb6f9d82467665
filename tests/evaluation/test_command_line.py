"""Items of a split through `sigmerge evaluate` and through lm_eval's own command line: the same."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import huggingface_hub
import pytest
import yaml

from sigmerge.errors import ScoreError
from sigmerge.evaluation import splits
from sigmerge.evaluation.sources import Data
from sigmerge.evaluation.suite import load_suite
from sigmerge.nano.files import POOL, load_items
from tests.evaluation.scored import evaluate
from tests.forks import forked
from tests.kept_entries import kept_answers, kept_parts
from tests.nano.measure import answers

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'sigmerge-llm[eval]'")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own tasks over the embedded pool's items: one that generates, one that chooses."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "tasks").mkdir()
    facts = load_items("evaluation", "math")[:40]
    answers = [fact.answer for fact in facts]
    rows = [
        {"prompt": f.prompt, "answer": f.answer, "choices": [f.answer, _other(answers, i)]}
        for i, f in enumerate(facts)
    ]
    data = folder / "facts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "num_fewshot": 0,
    }
    said = {
        "task": "nano_said",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    chosen = {
        "task": "nano_chosen",
        "output_type": "multiple_choice",
        "doc_to_target": 0,
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    }
    for task in (said, chosen):
        (folder / f"tasks/{task['task']}.yaml").write_text(yaml.safe_dump({**shared, **task}))
    marks = {
        "said": ("nano_said", "exact_match,none"),
        "chosen": ("nano_chosen", "acc,none"),
    }
    domains = {
        name: {
            name: {
                "harness": "lm_eval",
                "task": task,
                "include_path": "tasks",
                "metrics": {"right": metric},
            }
        }
        for name, (task, metric) in marks.items()
    }
    (folder / "own.yaml").write_text(yaml.safe_dump({"name": "own", "domains": domains}))
    return folder


def _other(answers: list[str], i: int) -> str:
    """The nearest answer before this one that is another."""
    return next(a for a in (answers * 2)[len(answers) + i :: -1] if a != answers[i])


def _texts(value: Any) -> Any:
    """Every number as a text, as the command line logs them: all digits count."""
    return [_texts(v) for v in value] if isinstance(value, list) else str(value)


def test_a_split_scores_as_in_lm_evals_own_command_line(place: Path, tmp_path: Path):
    """Metric and output of every item; the split's order is not the harness's."""
    suite = load_suite(place / "own.yaml")
    items, _ = splits.load_available(suite, Data())
    drawn = {name: m["drawn"] for name, m in splits.build(suite, items)["benchmarks"].items()}
    wanted = {
        f"nano_{name}": sorted(int(i.partition("/")[2]) for i in ids) for name, ids in drawn.items()
    }
    checkpoint = POOL / "math"
    command = [
        "lm_eval", "run", "--model", "hf", "--model_args",
        f"pretrained={checkpoint},dtype=float32", "--tasks", "nano_said,nano_chosen",
        "--include_path", str(place / "tasks"), "--samples", json.dumps(wanted),
        "--log_samples", "--output_path", str(tmp_path / "out"), "--device", "cpu",
        "--batch_size", "4",
    ]  # fmt: skip

    def work() -> None:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.tasks import TaskManager

        index = TaskManager.__init__  # without its own tasks, which takes ten seconds
        TaskManager.__init__ = lambda *given, **how: index(
            *given, **{**how, "include_defaults": False}
        )
        for library in (huggingface_hub.constants, datasets.config):
            library.HF_HUB_OFFLINE = True
        sys.argv = command
        cli_evaluate()

    ran = forked(work)
    assert ran.code == 0, ran
    evaluate(checkpoint, str(place / "own.yaml"), batch_size=4, dtype="float32")
    metrics = {"said": "exact_match", "chosen": "acc"}
    for name, metric in metrics.items():
        (log,) = (tmp_path / "out").rglob(f"samples_nano_{name}_*.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        expected = {f"all/{row['doc_id']}": (row[metric], _texts(row["resps"])) for row in rows}
        found = {
            item: (scores[f"{metric},none"], _texts(output))
            for item, (scores, output) in kept_answers(name).items()
        }
        assert found.keys() == set(drawn[name])
        assert found == expected


def test_a_task_that_changed_in_the_same_process_is_another(place: Path, tmp_path: Path):
    """Its index is no memory: a changed task is read anew, and one that was added is found."""
    own = Path(shutil.copytree(place, tmp_path / "own"))
    content = yaml.safe_load((own / "own.yaml").read_text())
    del content["domains"]["said"]
    (own / "own.yaml").write_text(yaml.safe_dump(content))
    right = [evaluate(POOL / "math", str(own / "own.yaml"), limit=8)["macro"]]
    task = own / "tasks/nano_chosen.yaml"
    task.write_text(task.read_text().replace("doc_to_target: 0", "doc_to_target: 1"))
    right.append(evaluate(POOL / "math", str(own / "own.yaml"), limit=8)["macro"])
    assert sum(right) == 1 and right[0] != right[1]
    (own / "tasks/late.yaml").write_text(task.read_text().replace("nano_chosen", "nano_late"))
    (own / "own.yaml").write_text(yaml.safe_dump(content).replace("nano_chosen", "nano_late"))
    assert evaluate(POOL / "math", str(own / "own.yaml"), limit=8)["macro"] == right[1]


def test_examples_of_another_split_make_other_items(place: Path, tmp_path: Path):
    """They stand before every question, and no record of the split that is scored has them."""
    shots = tmp_path / "shots.jsonl"
    task = yaml.safe_load((place / "tasks/nano_said.yaml").read_text())
    task["dataset_kwargs"]["data_files"]["train"] = str(shots)
    task |= {"task": "nano_shown", "num_fewshot": 2, "fewshot_split": "train"}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/nano_shown.yaml").write_text(yaml.safe_dump(task))
    mark = {"harness": "lm_eval", "task": "nano_shown", "include_path": "tasks",
            "metrics": {"right": "exact_match,none"}}  # fmt: skip
    suite = {"name": "own", "domains": {"a": {"x": mark}}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(suite))
    digests = []
    for answer in ("one", "another"):
        rows = [{"prompt": f"ask {i}", "answer": answer, "choices": []} for i in range(3)]
        shots.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found, _ = splits.load_available(load_suite(tmp_path / "own.yaml"), Data())
        digests.append([item.digest for item in found["x"]])
    assert len(digests[0]) == 40 and not {*digests[0]} & {*digests[1]}


def test_a_task_of_the_hub_is_not_downloaded_unasked():
    mark = {"harness": "lm_eval", "task": "arc_easy", "metrics": {"acc": "acc,none"}}
    suite = load_suite({"name": "own", "domains": {"a": {"arc": mark}}})
    with pytest.raises(ScoreError, match=r"task arc_easy reads allenai/ai2_arc from the hub"):
        splits.load_available(suite, Data())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "nano_sad"}, "did you mean 'nano_said'"),
        ({"include_path": "nowhere"}, "no such folder"),
    ],
)
def test_a_wrong_task_is_refused_in_words(place: Path, change: dict[str, str], words: str):
    mark = {"harness": "lm_eval", "task": "nano_said", "include_path": str(place / "tasks"),
            "metrics": {"acc": "acc,none"}, **change}  # fmt: skip
    suite = load_suite({"name": "own", "domains": {"a": {"x": mark}}})
    with pytest.raises(ScoreError, match=words):
        splits.load_available(suite, Data())


def test_the_nano_suite_is_the_pools_own_scorer():
    """The suite gives the numbers that training logged, and stores every answer."""
    checkpoint = POOL / "coding"
    found = evaluate(checkpoint, "nano", "calibration")
    logged = next(
        record["scores"]
        for record in map(json.loads, (POOL / "log.jsonl").read_text().splitlines())
        if record.get("member") == "coding" and record.get("split") == "calibration"
    )
    assert found["domains"] == pytest.approx(logged, abs=1e-12)
    assert found["macro"] == pytest.approx(fmean(logged.values()), abs=1e-12)
    expected = answers(checkpoint, "calibration")
    assert sum(found["items"].values()) == len(expected)
    outputs = sorted(row["output"] for row in kept_parts("answer").values())
    assert outputs == sorted(output for output, _ in expected.values())
