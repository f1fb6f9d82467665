"""`sigmerge verify` finds every damage to a result, and `--deep` also where the records agree."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import sigmerge
from sigmerge.checkpoints.writer import Layout
from sigmerge.files.locks import only_writer
from sigmerge.jobs.verify import Sample
from sigmerge.records import Provenance
from tests.checkpoints.test_hub import hub, server
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, make_pool, weight_bytes
from tests.probing import models

__all__ = ["hub", "server"]  # fixtures
DOMAINS = ("math", "coding", "safety")
SCORES: dict[str, Any] = {
    "experts": {e: {d: 0.9 if d == e else 0.4 for d in DOMAINS} for e in DOMAINS},
    "anchor": {"math": 0.5, "coding": 0.8, "safety": 0.9},
}
RECORDS = "sigmerge/provenance.json"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    made = make_pool(tmp_path_factory.mktemp("verified"), layers=3, dtype="bf16", tokenizer=True)
    (made.root / "scores.json").write_text(json.dumps(SCORES))
    return made


@pytest.fixture(scope="module")
def made(pool: PoolOnDisk, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A result of every kind; tests damage copies."""
    root = tmp_path_factory.mktemp("results")
    each = {"density": (0.3, 0.5, 0.7)}
    for method in ("ties", "dare_ties"):
        recipe = pool.write(pool.recipe(method, each=each, seed=3), f"{method}.yaml")
        sigmerge.merge(recipe, root / method, max_shard_size="20KB")
    repair = pool.recipe("task_arithmetic", repair={"scores": "scores.json"})
    sigmerge.run(pool.write(repair, "run.yaml"), root / "run")
    return {name: root / name for name in ("ties", "dare_ties", "run")}


@pytest.fixture
def result(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(made[name], tmp_path / name))


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def flip(file: Path) -> None:
    """The lowest bit of the last value."""
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def forge(folder: Path) -> None:
    """Records that agree with the files as they are now."""
    file = folder / RECORDS
    content = json.loads(file.read_text())
    content["outputs"] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in content["outputs"]
    }
    Provenance.model_validate(content).write(file)


def change(file: Path, tensor: str, value: float) -> None:
    """One value of a tensor."""
    weights = load_file(file)
    weights[tensor].view(-1)[7] = value
    save_file(weights, file, {"format": "pt"})


def nan(folder: Path) -> None:
    content = bytearray(shard(folder).read_bytes())
    content[-2:] = b"\xc0\x7f"
    shard(folder).write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda f: flip(shard(f)), "digests: {shard}: is not what was written"),
    "a truncated shard": (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-9]), "headers: "),
    "a missing tokenizer": (lambda f: (f / "tokenizer.json").unlink(),
                            "digests: tokenizer.json: is missing"),
    "an extra shard": (lambda f: shutil.copy(shard(f), f / "model-00099-of-00099.safetensors"),
                       "digests: model-00099-of-00099.safetensors: is not in"),
    "NaN": (nan, "numbers: .*nan at flat index"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_exit_code_is_3(result: Callable[[str], Path], damage: str) -> None:
    folder = result("ties")
    assert command("verify", folder).code == 0
    hurt, message = DAMAGE[damage]
    hurt(folder)
    ran = command("verify", folder)
    assert ran.code == 3
    found = ran.out.replace("\n", " ")
    assert re.search(message.format(shard=shard(folder).name), found), ran.out


def test_a_changed_input_is_named(tmp_path: Path) -> None:
    own = make_pool(tmp_path / "pool", layers=2, tokenizer=True)
    recipe = own.write(own.recipe("linear"))
    sigmerge.merge(recipe, tmp_path / "out")
    assert command("verify", tmp_path / "out", "--deep").code == 0
    config = own.experts["math"] / "config.json"
    config.write_text(config.read_text() + "\n")
    ran = command("verify", tmp_path / "out", "--deep")
    assert ran.code == 3
    assert f"inputs: {config}: has changed since the run" in ran.out
    assert "not checked: recomputed: inputs changed" in ran.out
    config.unlink()
    assert f"inputs: {config}: is not there any more" in command("verify", tmp_path / "out").out


@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_deep_finds_a_value_that_the_records_agree_with(
    result: Callable[[str], Path], method: str
) -> None:
    folder = result(method)
    sound = command("verify", folder, "--deep", "--json")
    assert sound.code == 0 and "recomputed" in sound.json[0]["checked"]
    flip(shard(folder))
    forge(folder)
    assert command("verify", folder).code == 0
    ran = command("verify", folder, "--deep", "--blocks", "all")
    assert ran.code == 3 and "1 values differ from the inputs and the plan" in ran.out


@pytest.mark.parametrize("written", ["{}@main", {"path": "{}", "revision": None}])
def test_deep_knows_the_base_however_it_is_written(
    pool: PoolOnDisk, tmp_path: Path, written: Any
) -> None:
    """It stands among the models, and is none of the experts."""
    base = json.loads(json.dumps(written).replace("{}", str(pool.reference)))
    recipe = pool.recipe("ties", each={"density": (0.3, 0.5, 0.7)})
    recipe["models"].insert(0, {"model": base})
    sigmerge.merge(recipe, tmp_path / "out")
    (report,) = sigmerge.verify(tmp_path / "out", deep=True, blocks=None)
    assert not report.findings and "recomputed" in report.checked


BASES: dict[str, tuple[str, str, dict[str, str]]] = {
    "by a name of the hub": ("ties", "org/model", {}),
    "with a name of its own": ("ties", "{}", {"name": "start"}),
    "as one of a soup": ("linear", "{}", {}),
}


@pytest.mark.parametrize("which", BASES)
def test_deep_knows_which_of_the_models_is_the_base(
    pool: PoolOnDisk, tmp_path: Path, request: pytest.FixtureRequest, which: str
) -> None:
    """Else every other model would be taken for the one before it."""
    method, base, named = BASES[which]
    base = base.format(pool.reference)
    if base == "org/model":
        request.getfixturevalue("hub").add(base, pool.reference)
    recipe = pool.recipe(method) | {"base_model": base}
    recipe["models"].insert(1, {"model": base, "parameters": {"weight": 0.5}, **named})
    sigmerge.merge(recipe, tmp_path / "out")
    (report,) = sigmerge.verify(tmp_path / "out", deep=True, blocks=None)
    assert not report.findings and "recomputed" in report.checked


def test_deep_knows_a_model_whose_path_ends_as_another_does(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pool.reference, tmp_path / "old/model")
    shutil.copytree(pool.experts["math"], tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    sources = [{"model": name, "layer_range": [0, 3]} for name in ("old/model", "model")]
    recipe = {"merge_method": "slerp", "base_model": "old/model", "parameters": {"t": 0.3}}
    sigmerge.merge({**recipe, "slices": [{"sources": sources}]}, tmp_path / "out")
    monkeypatch.chdir(tmp_path / "old")
    (report,) = sigmerge.verify(tmp_path / "out", deep=True, blocks=None)
    assert not report.findings and "recomputed" in report.checked


def test_deep_compares_bits(tmp_path: Path) -> None:
    """A zero of the other sign is another result."""
    own = make_pool(tmp_path / "pool", layers=2)
    name = "model.layers.0.mlp.up_proj.weight"
    for folder in (own.reference, *own.experts.values()):
        change(folder / "model.safetensors", name, 0.0)
    sigmerge.merge(own.write(own.recipe("linear")), tmp_path / "out")
    assert command("verify", tmp_path / "out", "--deep").code == 0
    change(tmp_path / "out/model.safetensors", name, -0.0)
    forge(tmp_path / "out")
    ran = command("verify", tmp_path / "out", "--deep", "--blocks", "all")
    assert ran.code == 3 and f"recomputed: {name}: 1 values differ" in ran.out


@pytest.mark.parametrize("record", ["recipe.yaml", "plan.json"])
@pytest.mark.parametrize("garbage", ["[]", "models: 5", "{" * 3000, ""])
def test_records_that_explain_nothing_do_not_hide_a_change(
    result: Callable[[str], Path], record: str, garbage: str
) -> None:
    folder = result("ties")
    flip(shard(folder))
    (folder / "sigmerge" / record).write_text(garbage)
    forge(folder)
    ran = command("verify", folder, "--deep")
    assert ran.code == 3, ran.out
    assert "cannot be computed again" in ran.out


def test_a_run_is_its_anchor_and_its_repair(result: Callable[[str], Path]) -> None:
    folder = result("run")
    ran = command("verify", folder, "--deep", "--json")
    assert ran.code == 0, ran.out
    assert [Path(report["folder"]).name for report in ran.json] == ["anchor", "repaired"]
    assert all("recomputed" in report["checked"] for report in ran.json)
    flip(shard(folder / "anchor"))
    assert command("verify", folder).code == 3


def edit(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new, 1))


UNDONE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no repair": (lambda run: shutil.rmtree(run / "repaired"), "parts: repaired: is missing"),
    "no anchor": (lambda run: shutil.rmtree(run / "anchor"), "parts: anchor: is missing"),
    "no end": (lambda run: (run / "run.json").unlink(), "parts: run.json: is missing"),
    "other scores": (lambda run: edit(run / "calibration.json", "0.", "0.1"),
                     "digests: calibration.json: is not what the run wrote"),
    "another page": (lambda run: edit(run / "report.html", "<", " <"),
                     "digests: report.html: is not what the run wrote"),
    "another record": (lambda run: edit(run / "run.json", "0.", "0.1"),
                       "record: run.json: is not what was written"),
    "no records": (lambda run: shutil.rmtree(run / "repaired/sigmerge"),
                   "repaired: holds no sigmerge/provenance.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNDONE)
def test_a_run_without_one_of_its_parts(result: Callable[[str], Path], what: str) -> None:
    folder = result("run")
    undo, told = UNDONE[what]
    undo(folder)
    ran = command("verify", folder)
    assert ran.code == 3
    assert told in (ran.out + ran.err).replace("\n", " ")


def test_a_run_may_be_moved(made: dict[str, Path], tmp_path: Path) -> None:
    """Its repair is compared with the anchor that lies beside it now."""
    moved = made["run"].rename(tmp_path / "moved")
    try:
        reports = sigmerge.verify(moved, deep=True, blocks=None)
    finally:
        moved.rename(made["run"])
    assert [report.findings for report in reports] == [(), ()]
    assert all("recomputed" in report.checked for report in reports)


@pytest.mark.parametrize("other", ["repaired", "ties"])
def test_the_parts_of_a_run_belong_together(
    made: dict[str, Path], result: Callable[[str], Path], other: str
) -> None:
    """Each is sound by itself: the two exchanged, and an anchor of another merge."""
    run = result("run")
    (run / "anchor").rename(run / "before")
    if other == "repaired":
        (run / "repaired").rename(run / "anchor")
        (run / "before").rename(run / "repaired")
    else:
        shutil.copytree(made["ties"], run / "anchor")
    ran = command("verify", run)
    assert ran.code == 3 and f"{run}/repaired: " in ran.out, ran
    told = "no repair of the run's anchor" if other == "repaired" else "inputs: "
    assert told in ran.out.replace("\n", " ")


def test_a_page_is_made_again_of_what_the_run_wrote_only(result: Callable[[str], Path]) -> None:
    folder = result("run")
    (folder / "report.html").unlink()
    assert command("report", folder).code == 0
    assert command("verify", folder).code == 0
    sound, anchor = (folder / "calibration.json").read_text(), folder / "anchor"
    shutil.rmtree(anchor)  # it may be as large as the result, and the page shows none of it
    assert command("report", folder).code == 0
    assert "anchor/sigmerge/provenance.json" in (folder / "run.json").read_text()
    edit(folder / "calibration.json", "0.", "0.1")
    assert "calibration.json is not what the run wrote" in command("report", folder).err
    (folder / "calibration.json").write_text(sound)
    edit(folder / "run.json", "0.", "0.1")
    ran = command("report", folder)
    assert (ran.code, "run.json: is damaged" in ran.err) == (4, True)


def test_a_page_is_not_made_while_the_run_is(result: Callable[[str], Path]) -> None:
    folder = result("run")
    before, unfinished = (folder / "run.json").read_bytes(), folder / ".report.html.1-1.partial"
    unfinished.write_text("of a killed process")
    with only_writer(folder.with_name(f".{folder.name}.lock"), "held by the run"):
        ran = command("report", folder)
    assert ran.code == 4 and "another process is writing this run" in ran.err
    assert (folder / "run.json").read_bytes() == before
    assert command("report", folder).code == 0 and not unfinished.exists()


def test_the_run_of_a_given_anchor_has_none_of_its_own(pool: PoolOnDisk, tmp_path: Path) -> None:
    sigmerge.merge(pool.recipe("linear"), tmp_path / "made")
    recipe = pool.recipe("linear")
    recipe |= {"merge_method": "checkpoint", "anchor": str(tmp_path / "made")}
    recipe["repair"] = {"scores": str(pool.root / "scores.json")}
    for model in recipe["models"]:
        model.pop("parameters", None)
    sigmerge.run(recipe, tmp_path / "run")
    (report,) = sigmerge.verify(tmp_path / "run")
    assert report.ok and report.folder.name == "repaired"


@pytest.mark.parametrize("name", ["ties", "run/repaired"])
@pytest.mark.parametrize("changed", ["dtype", "shape"])
def test_deep_compares_types_and_shapes(
    result: Callable[[str], Path], name: str, changed: str
) -> None:
    """The same bytes, read otherwise."""
    whole, _, part = name.partition("/")
    folder = result(whole) / part
    sides = next(t.shape for f in folder.glob("*.safetensors") for t in load_file(f).values()
                 if len(t.shape) == 2 and t.shape[0] != t.shape[1])  # fmt: skip
    matrix, turned = (f"[{a},{b}]".encode() for a, b in (sides, sides[::-1]))
    old, new = {"dtype": (b'"BF16"', b'"F16" '), "shape": (matrix, turned)}[changed]
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(content[:end].replace(old, new) + content[end:])
    forge(folder)
    ran = command("verify", folder, "--deep", "--blocks", "all")
    assert ran.code == 3
    assert "type and shape differ" in ran.out.replace("\n", " ")


def test_deep_finds_a_changed_repair(result: Callable[[str], Path]) -> None:
    folder = result("run") / "repaired"
    name = "model.layers.2.mlp.up_proj.weight"
    change(shard(folder), name, 3.0)
    forge(folder)
    assert command("verify", folder).code == 0
    ran = command("verify", folder, "--deep", "--blocks", "all")
    assert ran.code == 3 and f"recomputed: {name}: 1 values differ" in ran.out


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "claimed": (lambda plan: plan["claimed"][1].__setitem__(0, 7), "the plan's claimed differs"),
    "support": (lambda plan: plan["support"].pop(), "support of the plan: has"),
    "order": (lambda plan: plan["order"].__setitem__(0, "art"), "claims for art, which is no"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_deep_finds_a_plan_that_tells_something_else(
    result: Callable[[str], Path], forged: str
) -> None:
    folder = result("run") / "repaired"
    change_plan, told = FORGED[forged]
    file = folder / "sigmerge/plan.json"
    plan = json.loads(file.read_text())
    change_plan(plan)
    file.write_text(json.dumps(plan))
    forge(folder)
    ran = command("verify", folder, "--deep", "--blocks", "all")
    assert ran.code == 3 and told in ran.out.replace("\n", " ")


def test_deep_on_a_merge_that_reads_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exemplars are found from any folder, though the recipe names them from its own."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("SIGMERGE_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "pool"
    models.write_expert(root / "reference")
    lines = ["merge_method: regmean", "base_model: reference", "models:"]
    for seed, name in enumerate(("math", "coding"), start=1):
        models.write_expert(root / name, seed=seed, near=root / "reference")
        models.write_exemplars(root / f"{name}.jsonl", seed, count=5)
        lines.append(f"  - {{model: {name}, exemplars: {name}.jsonl}}")
    (root / "recipe.yaml").write_text("\n".join(lines) + "\n")
    sigmerge.merge(root / "recipe.yaml", tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    ran = command("verify", "out", "--deep", "--json")
    assert ran.code == 0 and "recomputed" in ran.json[0]["checked"], ran.out
    flip(shard(tmp_path / "out"))
    forge(tmp_path / "out")
    assert command("verify", "out", "--deep", "--blocks", "all").code == 3


def test_a_pool_is_checked_before_it_is_merged(pool: PoolOnDisk, tmp_path: Path) -> None:
    members = [pool.reference, *pool.experts.values()]
    assert command("verify", "--pool", *members).code == 0
    other = make_pool(tmp_path / "other", layers=2, dtype="bf16", tokenizer=True)
    ran = command("verify", "--pool", pool.reference, other.experts["math"])
    assert ran.code == 3 and "problem: pool: members: " in ran.out


def test_a_folder_that_sigmerge_did_not_write(pool: PoolOnDisk) -> None:
    ran = command("verify", pool.reference)
    assert ran.code == 3
    assert "holds no sigmerge/provenance.json, by which it could be checked" in ran.err
    assert command("verify", pool.reference, pool.reference).code == 2


def test_the_seed_draws_the_blocks() -> None:
    keys = [f"layer {i}" for i in range(40)]
    drawn = [Sample(4, seed).of(keys) for seed in range(200)]
    assert {len(each) for each in drawn} == {4} and set().union(*drawn) == set(keys)
    assert Sample(4, 17).of(keys) == drawn[17]
    assert Sample(4, 1).of(keys[:2]) == set(keys[:2])
    assert Sample(None, 1).of(keys) == set(keys)


def test_deep_says_how_much_it_computed(result: Callable[[str], Path]) -> None:
    """Three layers, and embeddings, head and norm in a block each."""
    folder = result("ties")

    def extent(*words: str) -> str:
        ran = command("verify", folder, "--deep", "--json", *words)
        assert ran.code == 0, ran
        return str(ran.json[0]["extent"]["recomputed"])

    total = int(extent("--blocks", "all").split()[2])
    assert extent("--blocks", "all") == extent("--blocks", "99") == f"{total} of {total} blocks"
    assert extent("--seed", "5", "--blocks", "1") == f"1 of {total} blocks, drawn by --seed 5"
    assert len({extent("--blocks", "1") for _ in range(3)}) > 1
    assert "recomputed (4 of" in command("verify", folder, "--deep").out
    assert command("verify", folder, "--deep", "--blocks", "0").code == 2
    assert command("verify", folder, "--deep", "--blocks", "some").code == 2


def test_a_seed_that_draws_the_changed_block_finds_it(result: Callable[[str], Path]) -> None:
    folder = result("ties")
    flip(shard(folder))
    forge(folder)
    codes = {
        seed: command("verify", folder, "--deep", "--blocks", "1", "--seed", str(seed)).code
        for seed in range(12)
    }
    assert set(codes.values()) == {0, 3}
    assert command("verify", folder, "--deep", "--blocks", "all").code == 3


def test_deep_finds_a_change_outside_the_layers_of_a_repair(result: Callable[[str], Path]) -> None:
    folder = result("run") / "repaired"
    change(shard(folder), "model.embed_tokens.weight", 3.0)
    forge(folder)
    ran = command("verify", folder, "--deep", "--blocks", "all")
    assert ran.code == 3 and "recomputed: model.embed_tokens.weight: " in ran.out


@pytest.mark.parametrize("name", ["ties", "run"])
def test_deep_finds_a_tensor_that_was_added(result: Callable[[str], Path], name: str) -> None:
    folder = result(name) / ("repaired" if name == "run" else "")
    file = shard(folder)
    weights = load_file(file)
    weights["model.layers.0.mlp.gate.bias"] = next(iter(weights.values())).clone()
    save_file(weights, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"]["model.layers.0.mlp.gate.bias"] = file.name
        del content["metadata"]["total_size"]
        index.write_text(json.dumps(content))
    forge(folder)
    ran = command("verify", folder, "--deep")
    assert "model.layers.0.mlp.gate.bias: comes from no input" in ran.out, ran


ADDED = [
    "pytorch_model.bin", "model.pt", "adapter.pth", "flax_model.msgpack", "tf_model.h5",
    "last.ckpt", "modeling_llama.py", "model.PT", "weights", "x.gguf", "native.so", ".hidden.pkl",
    "sub/model.onnx", "added_tokens.json", "vocab.txt", "sigmerge/modeling.py",
]  # fmt: skip


@pytest.mark.parametrize("name", ADDED)
def test_a_file_that_a_loader_could_pick_up_is_reported(
    result: Callable[[str], Path], name: str
) -> None:
    folder = result("ties")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    ran = command("verify", folder)
    assert ran.code == 3 and f"digests: {name}: is not in the record" in ran.out, ran


def test_a_folder_behind_a_link_is_reported(result: Callable[[str], Path], tmp_path: Path) -> None:
    folder = result("ties")
    (tmp_path / "elsewhere").mkdir()
    (folder / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    assert "digests: 1_Pooling: is not in the record" in command("verify", folder).out


def test_pages_may_be_added(result: Callable[[str], Path]) -> None:
    folder = result("ties")
    for name in ("NOTES.md", "LICENSE", "figure.png", ".gitattributes", "sigmerge/report.html"):
        (folder / name).write_text("x")
    assert command("verify", folder).code == 0


def test_blocks_are_made_by_turns_of_their_shards(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours in time lie in different files, and a file is made from its beginning on."""
    from sigmerge.checkpoints.writer import Output

    places: list[tuple[int, int]] = []
    finish = Output.finish

    def noted(self: Output, block: str, *rest: Any) -> None:
        layout: Layout = self.layout
        prefix = f"model.layers.{block.removeprefix('layer ')}."
        own = [n for n in layout.slots if n == block or n.startswith(prefix)]
        places.append(layout.place(own))
        finish(self, block, *rest)

    monkeypatch.setattr(Output, "finish", noted)
    recipe = pool.write(pool.recipe("linear"), "ordered.yaml")
    sigmerge.merge(recipe, tmp_path / "out", max_shard_size="8KB", threads=1)
    shards = [shard for shard, _ in places]
    assert shards == [0, 1, 2, 0, 1, 0]
    for shard in set(shards):
        begins = [begin for at, begin in places if at == shard]
        assert begins == sorted(begins)


def test_a_repair_whose_anchor_was_not_kept_is_as_it_should_be(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    recipe = pool.recipe("task_arithmetic", repair={"scores": "scores.json"})
    sigmerge.merge(pool.write(recipe, "both.yaml"), tmp_path / "out")
    ran = command("verify", tmp_path / "out", "--json")
    assert ran.code == 0, ran
    assert "inputs" in ran.json[0]["checked"]


def emptied(record: dict[str, Any]) -> object:
    return record["inputs"].clear()


def reworded(record: dict[str, Any]) -> object:
    return record["inputs"][0].update(member="law")


def shortened(record: dict[str, Any]) -> object:
    return record["outputs"].pop("sigmerge/plan.json")


@pytest.mark.parametrize("change", [emptied, reworded, shortened])
def test_a_record_that_was_changed_is_a_problem(
    result: Callable[[str], Path], change: Callable[[dict[str, Any]], object]
) -> None:
    """No other check sees these three."""
    folder = result("ties")
    record = json.loads((folder / RECORDS).read_text())
    (folder / RECORDS).write_text(json.dumps(record))  # other blanks, nothing else
    assert command("verify", folder).code == 0
    change(record)
    (folder / RECORDS).write_text(json.dumps(record))
    ran = command("verify", folder)
    assert ran.code == 3 and "record: provenance.json: is not what was written" in ran.out
    del record["checksum"]
    (folder / RECORDS).write_text(json.dumps(record))
    assert command("verify", folder).code == 3


def test_all_of_a_kept_anchor_is_compared(pool: PoolOnDisk, tmp_path: Path) -> None:
    """A copy takes no computing, so nothing is left to chance."""
    sigmerge.merge(pool.recipe("linear"), tmp_path / "anchor")

    def worse(folder: Path) -> dict[str, float]:
        return dict.fromkeys(DOMAINS, 0.9 if folder.name in pool.experts else
                             0.5 if folder.name == "anchor" else 0.1)  # fmt: skip

    recipe = pool.recipe("linear", repair={"guard": "keep_anchor"})
    kept = sigmerge.repair(recipe, tmp_path / "out", anchor=tmp_path / "anchor", score=worse)
    assert kept.repair.guard is not None and kept.repair.guard.kept == "anchor"
    (report,) = sigmerge.verify(tmp_path / "out", deep=True, blocks=1)
    assert report.ok and report.extent["recomputed"] == "4 of 4 blocks"
    for layer in range(3):
        copy = Path(shutil.copytree(tmp_path / "out", tmp_path / f"changed-{layer}"))
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        change(shard(copy), name, 3.0)
        forge(copy)
        (report,) = sigmerge.verify(copy, deep=True, blocks=1, seed=0)
        assert [finding.about for finding in report.findings] == [name]


LINKED = ["a.md", "sigmerge/report.html", "LICENSE", "checkpoints/1/page.html"]


@pytest.mark.parametrize("name", LINKED)
def test_a_link_is_no_page(result: Callable[[str], Path], name: str) -> None:
    """What it leads to may be anything tomorrow."""
    folder = result("ties")
    (folder / "real.md").write_text("x")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(folder / "real.md")
    ran = command("verify", folder)
    assert ran.code == 3 and f"digests: {name}: is not in the record" in ran.out, ran


def test_a_repair_of_models_whose_architectures_were_overridden_is_computed_again(
    tmp_path: Path,
) -> None:
    pool = make_pool(tmp_path / "pool")
    file, scores = pool.experts["math"] / "config.json", tmp_path / "scores.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "MistralForCausalLM"))
    scores.write_text(json.dumps(SCORES))
    recipe = pool.recipe("task_arithmetic", repair={"scores": str(scores)})
    named = {"override_architecture": "MistralForCausalLM"}
    recipe["base_model"] = {"model": recipe["base_model"], **named}
    sigmerge.run(recipe, tmp_path / "run")
    (_, repaired) = sigmerge.verify(tmp_path / "run", deep=True)
    assert "recomputed" in repaired.checked and repaired.ok, repaired.findings
    plan = tmp_path / "run" / "repaired" / "sigmerge" / "plan.json"
    sigmerge.replay(plan, tmp_path / "again")
    file = "model.safetensors"
    whole = plan.parents[1]
    assert weight_bytes(tmp_path / "again")[file] == weight_bytes(whole)[file]


def test_a_record_whose_digests_were_removed_is_a_problem(result: Callable[[str], Path]) -> None:
    folder = result("ties")
    record = json.loads((folder / RECORDS).read_text())
    (folder / RECORDS).write_text(json.dumps({**record, "outputs": {}}))
    ran = command("verify", folder)
    assert ran.code == 3 and "lists no digests" in ran.out


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "no text": lambda records: (records / "recipe.yaml").write_bytes(b"\xff"),
    "no mapping of models": lambda records: (records / "recipe.yaml").write_text("models: 5"),
    "a device": lambda records: (
        (records / "recipe.yaml").unlink(), (records / "recipe.yaml").symlink_to("/dev/full"),
    ),
    "another plan": lambda records: (records / "plan.json").write_text(
        (records / "plan.json").read_text().replace('"order": [', '"order": ["art", ')
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_page_of_damaged_records_is_one_error(result: Callable[[str], Path], what: str) -> None:
    run = result("run")
    UNREADABLE[what](run / "repaired/sigmerge")
    ran = command("report", run)
    assert ran.code == 4 and ran.err.startswith(f"error: {run}") and "fault" not in ran.err, ran


def test_a_page_of_a_recipe_that_expands_without_end(result: Callable[[str], Path]) -> None:
    """Ten aliases of ten aliases: a billion values, in a few lines."""
    run = result("run")
    rows = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10) if i else 1}]" for i in range(10)]
    text = "\n".join([*rows, "merge_method: linear", "parameters: {weight: *a9}"])
    (run / "repaired/sigmerge/recipe.yaml").write_text(text)
    assert command("report", run).code == 0
