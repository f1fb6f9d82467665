"""Suites: what they mean, what is refused, and that a killed one ends in the same store."""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
import sys
import textwrap
import time
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import sigmerge as package
from sigmerge.errors import PoolError, ScoreError
from sigmerge.files.safe_open import remove
from sigmerge.jobs.options import Options
from sigmerge.jobs.probe import TEMPLATE, ProbeJob
from sigmerge.lab.experiments import group
from sigmerge.lab.experiments.plan import _reads_exemplars, _search_items, plans
from sigmerge.lab.experiments.scoring import check_benchmarks, check_probes
from sigmerge.lab.experiments.store import STORE, open_read_only
from sigmerge.lab.experiments.suite import SHIPPED_EXPERIMENTS, load_suite
from sigmerge.operators.table import operator
from sigmerge.recipe.scored import SearchSection
from sigmerge.recipe.sections import CaptureSection
from tests.command_line import Ran, refused, sigmerge, tree
from tests.evaluation.tiny import write_judge
from tests.forks import Fork, command, forked
from tests.pools import PoolOnDisk, make_pool

SCORER = """
    import hashlib, json, pathlib, sys

    folder, split = pathlib.Path(sys.argv[1]), sys.argv[2]
    content = b"".join(f.read_bytes() for f in sorted(folder.glob("*.safetensors")))
    scores = {}
    for domain in ("math", "coding", "safety"):
        draw = hashlib.sha256(content + f"{split} {domain}".encode()).digest()[0] / 255
        scores[domain] = 0.9 if folder.name == domain else 0.2 + 0.5 * draw
    print(json.dumps(scores))
"""


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return make_pool(tmp_path / "pool", layers=2, dtype="bf16")


def definition(pool: PoolOnDisk, **more: Any) -> dict[str, Any]:
    script = pool.root.parent / "score.py"
    script.write_text(textwrap.dedent(SCORER))
    return {
        "name": "tiny",
        "pools": [str(pool.root)],
        "command": f"{sys.executable} -I -S {script} {{checkpoint}} {{split}}",
        "anchors": [
            {"name": "mean", "merge_method": "linear"},
            {"name": "dare", "merge_method": "dare_linear", "seeds": [0, 1],
             "parameters": {"weight": 0.4, "density": 0.5}},
        ],
        "baselines": [{"name": "ties", "merge_method": "ties", "parameters": {"density": 0.5}}],
        "variants_on": ["mean"],
        "repairs": {
            "ablation": ["equal_share"],
            "control": ["random_mask"],
            "sweep": {"c_max": [0.35, 0.55]},
            "ours": {"replace": {"update": "replace"}},
        },
        **more,
    }  # fmt: skip


def write(tmp_path: Path, content: dict[str, Any]) -> Path:
    file = tmp_path / "suite.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def export(out: Path) -> list[str]:
    with open_read_only(out / STORE) as store:
        return list(store.export())


def rows(out: Path) -> list[dict[str, Any]]:
    with open_read_only(out / STORE) as store:
        return store.frames().runs.to_dicts()


@dataclass(frozen=True)
class Whole:
    """A finished suite on a pool of its own. No test changes it."""

    pool: PoolOnDisk
    file: Path
    out: Path
    ran: Ran


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    pool = make_pool(folder / "pool", layers=2, dtype="bf16")
    file, out = write(folder, definition(pool)), folder / "out"
    return Whole(pool, file, out, sigmerge("suite", file, out, "--threads", "1", "--json"))


def test_a_suite_stores_every_run(whole: Whole) -> None:
    out, ran = whole.out, whole.ran
    assert ran.code == 0, ran
    found = rows(out)
    assert ran.json["runs"] == ran.json["made"] == len(found)
    kinds = Counter(row["kind"] for row in found)
    assert kinds == {
        "expert": 3, "anchor": 3, "default": 3, "ablation": 1, "control": 3, "sweep": 2, "ours": 1,
        "baseline": 1,
    }  # fmt: skip
    assert [row["kind"] for row in found[:5]] == ["expert"] * 3 + ["anchor", "default"]
    usual = {"c_min": 0.10, "c_max": 0.45, "scale": 0.60}
    for row in found:
        if row["kind"] in ("default", "sweep"):
            changed = {"c_max": float(row["setting"][6:])} if row["kind"] == "sweep" else {}
            assert json.loads(row["constants"]) == usual | changed
    [default] = [r for r in found if (r["kind"], r["anchor"]) == ("default", "mean")]
    assert (default["evaluation_calls"], default["spent_calls"]) == (3, 12)
    assert json.loads(default["share"]).keys() == {"math", "coding", "safety"}
    assert {file.name for file in out.iterdir()} == {STORE, "suite.yaml", "overview.json"}
    overview = json.loads((out / "overview.json").read_text())
    assert overview["pools"] == {"pool": {"done": 17, "runs": 17}}


def test_scores_are_those_of_the_command_line(whole: Whole, tmp_path: Path) -> None:
    """A row of the store against the same run by `repair`, scored by the same program."""
    command = definition(whole.pool)["command"]
    recipe = whole.pool.recipe("linear", weight=(1.0, 1.0, 1.0)) | {
        "repair": {"command": command, "variant": "random_mask", "seed": 2}
    }
    merged = package.merge({k: v for k, v in recipe.items() if k != "repair"}, tmp_path / "mean")
    repaired = package.repair(recipe, tmp_path / "again", anchor=merged.out)
    printed = subprocess.run(
        [sys.executable, whole.file.parent / "score.py", repaired.out, "evaluation"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    with open_read_only(whole.out / STORE) as store:
        frames = store.frames()
    [key] = frames.runs.filter((frames.runs["setting"] == "random_mask")
                               & (frames.runs["seed"] == 2))["key"].to_list()  # fmt: skip
    stored = frames.scores.filter(frames.scores["run"] == key)
    assert dict(zip(stored["domain"], stored["value"], strict=True)) == json.loads(printed)


def test_a_finished_suite_has_nothing_to_do_and_takes_more_pools(
    whole: Whole, tmp_path: Path
) -> None:
    content, out = definition(whole.pool), shutil.copytree(whole.out, tmp_path / "out")
    runs, before = whole.ran.json["runs"], export(out)
    again = package.suite(content, out, threads=1)
    assert (again.made, again.runs) == (0, runs) and export(out) == before
    other = make_pool(tmp_path / "other" / "pool", layers=2, dtype="bf16", seed=9)
    both = package.suite(content, out, pools=[whole.pool.root, other.root], threads=1)
    names = {row["pool"] for row in rows(out)}
    assert both.made == runs and len(names) == 2  # one folder name, two pools


def finished(out: Path) -> int:
    """The runs that the overview of a suite counts; 0 before it is written."""
    try:
        pools = json.loads((out / "overview.json").read_text())["pools"]
    except FileNotFoundError:
        return 0
    return sum(pool["done"] for pool in pools.values())


@pytest.mark.campaign
def test_a_suite_that_ended_while_it_removed_a_repair_goes_on(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path) -> None:
        if (path / "config.json").exists() and path.name == "repaired":
            (path / "config.json").unlink()
            raise KeyboardInterrupt
        remove(path)

    content = definition(pool)
    monkeypatch.setattr(group, "remove", half)
    with pytest.raises(KeyboardInterrupt):
        package.suite(content, tmp_path / "out", threads=1)
    monkeypatch.undo()
    assert list((tmp_path / "out").rglob("repaired"))
    assert package.suite(content, tmp_path / "out", threads=1).made > 0


@pytest.mark.parametrize(("jobs", "kills"), [("1", 4), ("2", 3)])
@pytest.mark.campaign
def test_a_suite_killed_again_and_again_ends_in_the_same_store(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: str, kills: int
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    words = ("suite", whole.file, out, "--jobs", jobs)
    draw, killed = random.Random(0), []
    for _ in range(kills):
        goal = finished(out) + draw.randint(0, 2)
        running = Fork(lambda: command(*words))
        while running.at_work() and finished(out) < goal:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.02))
        if running.at_work():
            running.killed()
            killed.append(finished(out))
        else:
            ran = running.ended()
            assert ran.code == 0, ran
    assert len(killed) >= 2 and any(0 < runs < finished(whole.out) for runs in killed)
    done = forked(lambda: command(*words))
    assert done.code == 0, done
    assert export(out) == export(whole.out)
    assert {file.name for file in out.iterdir()} == {file.name for file in whole.out.iterdir()}


@pytest.mark.campaign
def test_jobs_side_by_side_end_in_the_same_store(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Two processes, two pools whose order in the store is that of the suite."""
    other = make_pool(tmp_path / "other", layers=2, dtype="bf16", seed=9)
    few = definition(pool, repairs={"ablation": ["equal_share"]}, baselines=[])
    file, pools = write(tmp_path, few), ("--pool", pool.root, "--pool", other.root)
    for out, jobs in ((tmp_path / "one", "1"), (tmp_path / "two", "2")):
        ran = sigmerge("suite", file, out, *pools, "--jobs", jobs, "--json")
        assert ran.code == 0, ran
        assert {file.name for file in out.iterdir()} == {STORE, "suite.yaml", "overview.json"}
    assert export(tmp_path / "one") == export(tmp_path / "two")
    with open_read_only(tmp_path / "two" / STORE) as store:
        assert store.frames().pools["name"].to_list() == ["pool", "other"]


def test_an_error_of_a_process_is_the_error_of_the_suite(pool: PoolOnDisk, tmp_path: Path) -> None:
    content = definition(pool)
    (tmp_path / "score.py").write_text("print('no scores')")
    file = write(tmp_path, content)
    ran = sigmerge("suite", file, tmp_path / "out", "--jobs", "2")
    assert ran.code == 5 and "must be a JSON object of domain scores" in ran.err, ran


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"repairs": {"ablation": ["equal_shares"]}}, 2, "did you mean 'equal_share'?"),
        ({"variants_on": ["men"]}, 2, "did you mean 'mean'?"),
        ({"pool": []}, 2, "did you mean 'pools'?"),
        ({"anchors": [{"name": "a", "merge_metod": "linear"}]}, 2, "did you mean 'merge_method'?"),
        ({"anchors": ["liner"]}, 2, "did you mean 'linear'?"),
        ({"command": None}, 2, "give one of evaluate: and command:"),
        ({"partitions": [1]}, 2, "a command divides its own items"),
        ({"pools": ["nowhere"]}, 2, "no such pool folder"),
        ({"pools": []}, 2, "pass --pool FOLDER"),
        ({"experts": ["maths"]}, 2, "no checkpoint called maths"),
        ({"command": "true {checkpoint}"}, 5, "must say {split}"),
        ({"name": 3}, 2, "name: must be a string, not 3"),
        ({"anchors": 3}, 2, "anchors: must be a list, not 3"),
        ({"anchors": [3]}, 2, "anchors.0: must be a name or a mapping with name, recipe, "),
        ({"anchors": [{"merge_method": "linear"}]}, 2, "anchors.0.name: is missing"),
        (
            {"anchors": [{"name": "a", "merge_method": "ties", "seeds": ["0"]}]},
            2,
            "anchors.0.seeds.0: must be an integer, not '0'",
        ),
        (
            {"anchors": [{"name": "a", "merge_method": "ties", "seeds": []}]},
            2,
            "anchors.0.seeds: must not be empty",
        ),
        (
            {"anchors": [{"name": "a", "merge_method": "ties", "seeds": [1, 0, 1]}]},
            2,
            "anchors.0: seeds: 1 is given twice",
        ),
        ({"anchors": ["linear", "linear"]}, 2, "linear is given twice"),
        ({"repairs": [1]}, 2, "repairs: must be a mapping with ablation, control,"),
        ({"repairs": {"sweep": {"cmax": [0.3]}}}, 2, "did you mean 'c_max'?"),
        (
            {"repairs": {"sweep": {"c_max": [0.3, 0.5, 0.3]}}},
            2,
            "repairs: sweep.c_max: 0.3 is given twice",
        ),
        ({"repairs": {"sweep": {"c_max": [0.45]}}}, 2, "0.45 is the default itself"),
        (
            {"repairs": {"ablation": ["equal_share", "equal_share"]}},
            2,
            "repairs: equal_share is given twice",
        ),
        ({"partitions": [1, 1]}, 2, "partitions: 1 is given twice"),
        ({"dtype": "fp8"}, 2, "dtype: must be 'float32', 'bfloat16' or 'float16', not 'fp8'"),
        ({"most_seeds": 0}, 2, "most_seeds: must be greater than or equal to 1, not 0"),
        ({"pools": [{"nmae": "a"}]}, 2, "did you mean 'name'?"),
        ({"pools": [{"name": "a"}]}, 2, "pools.0: give path:, or reference: and experts:"),
    ],
)
def test_wrong_suites_are_refused(
    pool: PoolOnDisk, tmp_path: Path, change: dict[str, Any], code: int, said: str
) -> None:
    content = {**definition(pool), **change}
    file = write(tmp_path, {k: v for k, v in content.items() if v is not None})
    told = refused(code, "suite", file, tmp_path / "out", beside=tmp_path)
    assert said in told
    assert not any(word in told for word in ("Section", "function", "Input should", "valid "))


def test_a_folder_holds_one_suite(whole: Whole, tmp_path: Path) -> None:
    out = shutil.copytree(whole.out, tmp_path / "out")
    other = write(tmp_path, definition(whole.pool, variants_on=["dare"]))
    assert "another suite" in refused(4, "suite", other, out, beside=tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/thesis.txt").write_text("mine")
    assert "thesis.txt" in refused(4, "suite", other, tmp_path / "foreign", beside=tmp_path)


def test_an_anchor_may_be_a_recipe_file(pool: PoolOnDisk, tmp_path: Path) -> None:
    pool.write(pool.recipe("ties", {"density": 0.3}), "mine.yaml")
    anchors = [{"name": "mine", "recipe": "pool/mine.yaml", "seeds": [4]}]
    changes = {"anchors": anchors, "variants_on": None}
    [anchor] = load_suite(write(tmp_path, definition(pool, **changes))).anchors
    assert anchor.content() == {"merge_method": "ties", "parameters": {"density": 0.3}}
    wrong = [{"name": "mine", "recipe": "yours.yaml"}]
    file = write(tmp_path, definition(pool, anchors=wrong, variants_on=None))
    assert "no recipe file" in refused(2, "suite", file, tmp_path / "out", beside=tmp_path)


def test_a_link_to_a_pool_is_refused_by_a_dry_run(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(pool.root)
    file, pools = write(tmp_path, definition(pool)), ["--pool", pool.root, "--pool"]
    read: list[str] = []
    monkeypatch.setattr(
        "sigmerge.lab.experiments.plan.weight_digests", lambda *given: read.append("")
    )
    ran = sigmerge("suite", file, tmp_path / "out", *pools, tmp_path / "link", "--dry-run")
    assert ran.code == 2 and "are the same pool" in ran.err
    assert not read  # a dry run reads no weights


def test_a_dry_run_names_the_extra_of_a_search(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pymoo", None)
    searched = [{"name": "merge3", "merge_method": "dare_ties", "search": {"generations": 2}}]
    file = write(tmp_path, evaluated(pool, baselines=searched))
    ran = sigmerge("suite", file, tmp_path / "out", "--dry-run")
    assert ran.code == 6 and "sigmerge-llm[tune]" in ran.err, ran


def test_a_copy_of_a_pool_is_refused(pool: PoolOnDisk, tmp_path: Path) -> None:
    shutil.copytree(pool.root, tmp_path / "copy")
    file, pools = write(tmp_path, definition(pool)), ["--pool", pool.root, "--pool"]
    ran = sigmerge("suite", file, tmp_path / "out", *pools, tmp_path / "copy")
    assert ran.code == 2 and "are the same pool" in ran.err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_is_true(pool: PoolOnDisk, whole: Whole, tmp_path: Path) -> None:
    file = write(tmp_path, definition(pool))
    before = tree(tmp_path)
    told = sigmerge("suite", file, tmp_path / "out", "--dry-run", "--json")
    assert told.code == 0 and tree(tmp_path) == before
    [step] = told.json["steps"]
    facts = step
    assert facts["runs"] == whole.ran.json["made"]
    with open_read_only(whole.out / STORE) as store:
        scores = store.frames().scores
    for split in ("calibration", "evaluation"):
        scored = scores.filter(scores["split"] == split)["run"].n_unique()
        assert facts["evaluations"][split] == scored
    assert "17 runs: 3 experts" in sigmerge("suite", file, tmp_path / "new", "--dry-run").out


def test_what_a_method_gets_wrong_is_reported_of_the_suite(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    """Not of the recipe that the suite is made into, whose lines nobody has seen."""
    method = {"name": "mine", "merge_method": "ties", "parameters": {"densty": 0.5}}
    file = write(tmp_path, definition(pool, anchors=[method], variants_on=["mine"]))
    said = refused(2, "suite", file, tmp_path / "out", "--dry-run", beside=tmp_path)
    assert "suite tiny: mine cannot be run on the pool pool with the setting default" in said
    assert "did you mean 'density'" in said and "line" not in said and "recipe" not in said


def test_shipped_suites_load_and_hold_the_papers_grid() -> None:
    names = {file.stem for file in SHIPPED_EXPERIMENTS.glob("*.yaml")}
    assert names == {"nano-study", "nano-compare", "nano-paper", "paper", "real"}
    for name in names:
        assert load_suite(name).section.name == name
    for name in ("paper", "nano-paper"):
        suite = load_suite(name)
        assert sum(len(anchor.seeds) for anchor in suite.anchors) == 11
        assert [len(each.seeds) for each in suite.baselines] == [1, 1, 1, 1, 3]
        variants = Counter(setting.kind for setting in suite.variants() for _ in setting.seeds)
        inversions = 2 if name == "paper" else 1
        assert variants["control"] == inversions + 3 + 1 + 3 + 3 + 5
        assert (variants["ablation"], variants["view"], variants["order"]) == (5, 3, 4)
        assert variants["sweep"] == 9


def test_the_papers_suite_rests_on_no_default() -> None:
    """Rulings 27, 29 and 31: every parameter, capture setting and budget stands in the file."""
    suite = load_suite("paper")
    limits = {}
    for method in (*suite.anchors, *suite.baselines):
        assert method.recipe is None and method.merge_method
        given = dict(method.parameters or {})
        chosen = operator(method.merge_method, given.pop("on", None))
        wanted = [p.name for p in chosen.parameters if not p.doc.startswith("accepted; ")]
        assert sorted(given) == sorted(wanted), method.name
        if chosen.with_parameters(given).needs:
            assert set(method.capture or {}) == {*CaptureSection.model_fields} - {
                "device",
                "folder",
            }
            limits[method.name] = (method.capture or {})["limit"]
    assert limits == {"Fisher": 1000, "RegMean": 1000, "CAT": 64, "LOT": 64}
    [search] = [method.search for method in suite.baselines if method.search]
    of_the_scoring = {"suite", "data", "hub", "judge", "allow_code_execution", "generations"}
    assert {*SearchSection.model_fields} - {*search} == of_the_scoring
    weights = {m.name: (m.parameters or {})["weight"] for m in suite.anchors}
    assert [weights[name] for name in ("TA", "DARE", "TIES", "DARE-TIES")] == [0.4, 0.4, 1.0, 1.0]
    assert {"inverted_capacity", "slope_inverted_capacity"} < set(suite.section.repairs.control)


def test_the_papers_suite_is_refused_without_its_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ruling 28: it never falls back to keywords."""
    monkeypatch.chdir(tmp_path)
    suite = load_suite("paper")
    place = suite.pools()[0]
    with pytest.raises(ScoreError, match="wildguard' is neither keyword nor a WildGuard"):
        check_benchmarks(place, suite, Options())


def test_probes_that_are_not_what_the_suite_says_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ruling 30: the paper's suite states template and number, those of `probe build`."""
    monkeypatch.chdir(tmp_path)
    suite = load_suite("paper")
    place = suite.pools()[0]
    assert suite.section.probes is not None and suite.section.probes.template == TEMPLATE
    for domain in DOMAINS:
        rows = [json.dumps({"prompt": f"{domain} {i}"}) for i in range(25)]
        Path(f"{domain}.jsonl").write_text("\n".join(rows))
    ProbeJob(Path("probe.jsonl"), data=[Path(f"{domain}.jsonl") for domain in DOMAINS]).run()
    check_probes(place, suite)
    made = Path("probe.jsonl").read_text()
    for wrong, words in (
        (made.replace("### Response:", "### Answer:", 1), "line 1: does not follow the template"),
        (made.split("\n", 1)[1], "math: 19 prompts, not 20"),
        (made.replace('"domain": "math"', '"domain": "maths"', 1), "'maths' is no domain"),
    ):
        Path("probe.jsonl").write_text(wrong)
        with pytest.raises(ScoreError, match=words):
            check_probes(place, suite)


SHAPES = {
    "meta-llama/Llama-3.2-3B": ("Llama", 28, 3072, 8192, 1024, 3072, 128256, True),
    "meta-llama/Llama-3.1-8B-Instruct": ("Llama", 32, 4096, 14336, 1024, 4096, 128256, False),
    "google/gemma-2-2b-it": ("Gemma2", 26, 2304, 9216, 1024, 2048, 256000, True),
}
"""Family, layers, hidden, inner, width of keys, width of queries, vocabulary, tied."""
DOMAINS = ("math", "instruction", "coding", "multilingual", "safety")


def tensors(family: str, layers: int, hidden: int, inner: int, keys: int, queries: int,
            words: int, tied: bool) -> dict[str, tuple[int, ...]]:  # fmt: skip
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "Gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (words, hidden), "model.norm.weight": (hidden,)
    }  # fmt: skip
    for i in range(layers):
        place = f"model.layers.{i}."
        found |= {f"{place}{norm}.weight": (hidden,) for norm in norms}
        found |= {
            f"{place}self_attn.q_proj.weight": (queries, hidden),
            f"{place}self_attn.k_proj.weight": (keys, hidden),
            f"{place}self_attn.v_proj.weight": (keys, hidden),
            f"{place}self_attn.o_proj.weight": (hidden, queries),
            f"{place}mlp.gate_proj.weight": (inner, hidden),
            f"{place}mlp.up_proj.weight": (inner, hidden),
            f"{place}mlp.down_proj.weight": (hidden, inner),
        }
    return found if tied else {**found, "lm_head.weight": (words, hidden)}


def hollow(folder: Path, shape: tuple[Any, ...]) -> int:
    """A checkpoint whose weights are a hole in a sparse file; the number of its parameters."""
    from tests.pools import write_tokenizer

    folder.mkdir(parents=True)
    header, offset = {}, 0
    for name, dims in tensors(*shape).items():
        size = 2
        for d in dims:
            size *= d
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + offset)
        for tensor in header.values():  # a reference and its experts are never equal
            stream.seek(8 + len(text) + tensor["data_offsets"][0])
            stream.write(zlib.crc32(str(folder).encode()).to_bytes(4, "little")[:2])
    family, layers, hidden, inner, *_, words, tied = shape
    config = {
        "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(),
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "vocab_size": words, "tie_word_embeddings": tied, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return offset // 2


def test_the_papers_suite_passes_a_dry_run_on_folders_of_the_true_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = []
    for reference, shape in SHAPES.items():
        sizes.append(hollow(tmp_path / reference, shape))
        for domain in DOMAINS:
            hollow(tmp_path / "MergeBench" / f"{Path(reference).name}_{domain}", shape)
    assert [round(size / 1e9, 2) for size in sizes] == [3.21, 8.03, 2.61]
    probes = [(domain, TEMPLATE.replace("{prompt}", f"w{i}")) for domain in DOMAINS
              for i in range(20)]  # fmt: skip
    lines = [json.dumps({"prompt": prompt, "domain": domain}) for domain, prompt in probes]
    (tmp_path / "probe.jsonl").write_text("\n".join(lines))
    for domain in DOMAINS:
        (tmp_path / "exemplars").mkdir(exist_ok=True)
        (tmp_path / f"exemplars/{domain}.jsonl").write_text('{"prompt": "w3", "response": "w4"}\n')
    write_judge(tmp_path / "wildguard")
    monkeypatch.setattr("sigmerge.lab.experiments.plan.weight_digests", None)  # reads no weights
    told = sigmerge("suite", "paper", tmp_path / "out", "--dry-run", "--json")
    assert told.code == 0, told
    steps = told.json["steps"]
    assert [step["anchors"] for step in steps] == [11, 11, 11]
    assert [step["disk_at_once"] for step in steps] == [4 * size for size in sizes]
    assert all(step["search_calls"] == 720 for step in steps)
    declared = 500 * 23 + 79156 * (5 + steps[0]["merges"])
    assert steps[0]["items_at_most"] == declared
    assert not (tmp_path / "out").exists()


def test_a_pool_with_another_configuration_is_another_pool(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    content = definition(pool)
    [plan] = plans(load_suite(content), Options(threads=1))
    before = plan.row.key
    file = pool.experts["math"] / "config.json"
    file.write_text(file.read_text() + "\n")
    [plan] = plans(load_suite(content), Options(threads=1))
    assert plan.row.key != before


def evaluated(pool: PoolOnDisk, **more: Any) -> dict[str, Any]:
    """The same suite, scored by benchmarks whose items lie outside the pool."""
    folder = pool.root.parent / "benchmarks"
    folder.mkdir(exist_ok=True)
    marks = {}
    for domain in ("math", "coding", "safety"):
        lines = ({"prompt": f"w{k}", "answer": f"w{k + 1}"} for k in range(10))
        (folder / f"{domain}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        marks[domain] = {f"{domain}-words": {"harness": "jsonl", "files": [f"{domain}.jsonl"]}}
    (folder / "words.yaml").write_text(yaml.safe_dump({"name": "words", "domains": marks}))
    content = definition(pool, evaluate={"suite": str(folder / "words.yaml")}, **more)
    return {key: value for key, value in content.items() if key != "command"}


def rewritten(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_whatever_decides_a_score_is_in_the_pools_key(pool: PoolOnDisk) -> None:
    def key() -> str:
        [plan] = plans(load_suite(evaluated_content), Options(threads=1))
        return plan.row.key

    evaluated_content = evaluated(pool)
    folder, keys = pool.root.parent / "benchmarks", []
    keys.append(key())
    assert key() == keys[0]
    rewritten(folder / "coding.jsonl", '"w3"', '"w7"')  # an item
    keys.append(key())
    rewritten(folder / "words.yaml", "harness: jsonl", "harness: jsonl\n      matcher: contains")
    keys.append(key())
    rewritten(folder / "words.yaml", "name: words", "name: words\nseed: 3")  # another division
    keys.append(key())
    assert len(set(keys)) == len(keys)
    moved = folder.rename(folder.with_name("elsewhere"))
    evaluated_content["evaluate"]["suite"] = str(moved / "words.yaml")
    assert key() == keys[-1]


def test_records_that_change_during_a_suite_stop_it(pool: PoolOnDisk) -> None:
    [plan] = plans(load_suite(evaluated(pool)), Options(threads=1))
    assert plan.row.key
    plan.check_same()
    rewritten(pool.root.parent / "benchmarks/coding.jsonl", '"w3"', '"w7"')
    with pytest.raises(PoolError, match="its records or settings changed"):
        plan.check_same()


def test_a_command_may_write_what_it_names_during_a_suite(pool: PoolOnDisk) -> None:
    [plan] = plans(load_suite(definition(pool)), Options(threads=1))
    assert plan.row.key
    rewritten(pool.root.parent / "score.py", "0.9", "0.8")
    plan.check_same()


def test_pools_of_one_folder_name_are_told_apart_by_their_parents(tmp_path: Path) -> None:
    folders = [tmp_path / name / "pool" for name in ("a", "b", "c/a")]
    pools = [make_pool(folder, layers=2) for folder in folders]
    suite = load_suite(definition(pools[0]), folders)
    assert [plan.name for plan in plans(suite, Options(threads=1))] == [
        "a/pool",
        "b/pool",
        "a/pool 3",
    ]


@pytest.mark.parametrize(
    ("method", "reads"),
    [({"merge_method": "fisher"}, True), ({"merge_method": "linear"}, False),
     ({"merge_method": "lines", "parameters": {"on": "regmean"}}, True),
     ({"merge_method": "lines", "parameters": {True: "regmean"}}, True),
     ({"merge_method": "lines", "parameters": {"on": "ties"}}, False)],
)  # fmt: skip
def test_a_key_has_exemplars_where_the_operator_reads_them(method: Any, reads: bool) -> None:
    assert _reads_exemplars(method) is reads


@pytest.mark.parametrize(("dtype", "written"), [({"dtype": "float16"}, "F16"), ({}, None)])
def test_a_suites_dtype_is_that_of_its_merges(
    pool: PoolOnDisk, dtype: dict[str, str], written: str | None
) -> None:
    [plan] = plans(load_suite(definition(pool, **dtype)), Options(threads=1))
    assert plan.plain.out_dtype == written


def test_runs_are_numbered_in_their_order(pool: PoolOnDisk) -> None:
    baselines = ["cabs", {"name": "other", "merge_method": "dare_ties", "seeds": [0, 1, 2]}]
    [plan] = plans(load_suite(definition(pool, baselines=baselines)), Options(threads=1))
    runs = [run.record for group in plan.groups() for run in group.runs]
    positions = [row.position for row in (*plan.experts(), *runs)]
    assert positions == list(range(len(positions))) and runs[-1].kind == "baseline"


@pytest.mark.parametrize(
    ("scoring", "searched"),
    [({"suite": "nano"}, {"suite": "nano"}), ({"suite": "nano", "pool": "p"}, {"suite": "p"}),
     ({"suite": "own.yaml", "data": "d", "limit": 3}, {"suite": "own.yaml", "data": "d"})],
)  # fmt: skip
def test_a_search_uses_the_items_of_the_scoring(scoring: Any, searched: Any) -> None:
    assert _search_items(scoring) == searched


def test_groups_are_named_by_method_and_seed(pool: PoolOnDisk) -> None:
    [plan] = plans(load_suite(definition(pool)), Options(threads=1))
    assert [group.label for group in plan.groups()] == [
        "mean",
        "dare seed 0",
        "dare seed 1",
        "ties",
    ]


def test_a_probe_is_in_the_keys_of_repairs_alone(pool: PoolOnDisk) -> None:
    probe = pool.root.parent / "probe.jsonl"
    content = definition(pool, probe=str(probe))

    def keys(prompt: str) -> dict[tuple[str, int], str]:
        probe.write_text(json.dumps({"prompt": prompt}))
        [plan] = plans(load_suite(content), Options(threads=1))
        rows = [run.record for group in plan.groups() for run in group.runs]
        return {(row.kind, row.position): row.recipe_key for row in rows}

    before, after = keys("one"), keys("two")
    changed = {kind for (kind, at), key in after.items() if key != before[kind, at]}
    kept = {kind for (kind, at), key in after.items() if key == before[kind, at]}
    assert changed == {"default", "ablation", "control", "sweep", "ours"}
    assert kept == {"anchor", "baseline"}


def test_the_program_that_scores_is_in_the_pools_key(pool: PoolOnDisk) -> None:
    content = definition(pool)
    [before] = plans(load_suite(content), Options(threads=1))
    assert before.row.key
    rewritten(pool.root.parent / "score.py", "0.9", "0.8")
    [after] = plans(load_suite(content), Options(threads=1))
    assert after.row.key != before.row.key


def test_domains_that_differ_from_the_experts_are_refused_before_a_run(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    file = write(tmp_path, evaluated(pool))
    rewritten(tmp_path / "benchmarks/words.yaml", "safety:", "law:")
    for more in ([], ["--dry-run"]):
        told = refused(5, "suite", file, tmp_path / "out", *more, beside=tmp_path)
        assert "safety: nothing scores it" in told and "law: no expert has this name" in told


def test_costs_do_not_depend_on_what_was_kept(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that scores sleeps: its time counts, also when its scores are kept ones."""
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    nap, anchors = 0.2, [{"name": "mean", "merge_method": "linear"}]
    content = definition(pool, anchors=anchors, repairs={"control": ["inverted_share"]})
    rewritten(
        tmp_path / "score.py", "import hashlib", f"import time; time.sleep({nap})\nimport hashlib"
    )
    for out in (tmp_path / "first", tmp_path / "again"):
        package.suite(content, out, threads=1)
    first, again = rows(tmp_path / "first"), rows(tmp_path / "again")
    for a, b in zip(first, again, strict=True):
        counted = [name for name in a if name.startswith(("spent_c", "spent_l", "eval", "lab"))]
        assert [a[name] for name in counted] == [b[name] for name in counted]
        assert a["gpu_seconds"] is b["gpu_seconds"] is None  # no GPU asked: not nought
        for row in (a, b):
            if row["method"] == "sigmerge":
                assert row["wall_seconds"] > nap  # one look, at the anchor
                assert row["spent_seconds"] > row["wall_seconds"] + 3 * nap  # and at the experts


def test_a_suite_without_anchors_is_refused(pool: PoolOnDisk, tmp_path: Path) -> None:
    ran = sigmerge("suite", write(tmp_path, definition(pool, anchors=[])), tmp_path / "out")
    assert ran.code == 2 and "anchors" in ran.err and "fault" not in ran.err


def test_the_device_of_a_suite_is_that_of_its_runs(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if there were a GPU: what each merge and repair is told; it is then made without one."""
    monkeypatch.setattr("sigmerge.jobs.options._check", lambda device: None)
    told: list[tuple[str, str]] = []

    def on_the_cpu(name: str) -> Any:
        real = getattr(group, name)

        def work(recipe: Any, second: Any, options: Options, *rest: Any, **more: Any) -> Any:
            told.append((name, options.device))
            return real(recipe, second, replace(options, device="cpu"), *rest, **more)

        return work

    for name in ("make_anchor", "RepairJob", "measure_profile"):
        monkeypatch.setattr(group, name, on_the_cpu(name))
    content = definition(pool, anchors=[{"name": "mean", "merge_method": "linear"}], repairs={})
    file = write(tmp_path, content)
    ran = sigmerge("suite", file, tmp_path / "out", "--device", "cuda", "--threads", "1")
    assert ran.code == 0, ran
    names = Counter(name for name, _ in told)
    assert names == {"make_anchor": 2, "RepairJob": 1, "measure_profile": 1}
    assert {device for _, device in told} == {"cuda"}
    assert Options(threads=1, device="cuda").in_a_task.device == "cuda"
