"""What is fuzzed: a sound folder, how it is damaged, and what must hold of the damaged one.

A target raises a SigmergeError to refuse an input. Whatever else it raises is a failure, and so is
a broken promise, which it reports by an AssertionError.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fuzz.corpus import MEASURED, RECIPES, text
from fuzz.mutations import mutate_folder
from sigmerge import api
from sigmerge.checkpoints.companions import companion_files, vocabulary
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.header import encode_header, read_header
from sigmerge.checkpoints.pool import open_pool
from sigmerge.checkpoints.statistics import (
    Entry,
    StatisticsFolders,
    block_file,
    write_block,
)
from sigmerge.checkpoints.writer import Output, plan_layout
from sigmerge.errors import SigmergeError
from sigmerge.evaluation import splits
from sigmerge.evaluation.sources import SHIPPED_BENCHMARKS, File, read_rows
from sigmerge.evaluation.suite import load_suite
from sigmerge.files import digests
from sigmerge.files.safe_open import is_regular
from sigmerge.jobs.options import Options
from sigmerge.jobs.scores import read_scores
from sigmerge.jobs.verify import VerifyJob
from sigmerge.method.deficit import check_scores
from sigmerge.probing.exemplars import read_exemplars
from sigmerge.recipe import load_recipe
from sigmerge.records import read_plan

SECRET = b"a file of the user, which no result may contain"
NAMES = ("model.embed_tokens.weight", "model.layers.0.w", "model.layers.1.w", "model.norm.weight")


@dataclass(frozen=True)
class Target:
    """`make` writes a sound folder once, `run` reads a damaged copy of it."""

    make: Callable[[Path], None]
    run: Callable[[Path], None]
    damaged: str = "."
    """The part of the folder that is damaged."""
    kinds: bool = True
    """Whether FIFOs and links are put in the place of files."""


def checkpoint(folder: Path, seed: int = 0, sharded: bool = False) -> None:
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 6,
              "num_hidden_layers": 2, "tie_word_embeddings": True,
              "torch_dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    words = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "c", "id": 2}]}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    rng = np.random.default_rng(seed)
    layout = plan_layout([(name, "F32", (6, 4)) for name in NAMES], 200 if sharded else 10**6)
    for number, name in enumerate(layout.files):
        own = [n for n, slot in layout.slots.items() if slot.shard == number]
        header, _ = encode_header([(n, "F32", (6, 4)) for n in own])
        values = rng.standard_normal(24 * len(own)).astype(np.float32)
        (folder / name).write_bytes(header + values.tobytes())
    for name, index in layout.indexes().items():
        (folder / name).write_text(json.dumps(index))


def pool(folder: Path) -> None:
    for seed, name in enumerate(("reference", "math", "code")):
        checkpoint(folder / "pool" / name, seed, sharded=name == "math")
    recipe = [
        "merge_method: ties",
        "base_model: pool/reference",
        "models:",
        "  - {model: pool/math, name: math, parameters: {weight: 0.5, density: 0.5}}",
        "  - {model: pool/code, name: code, parameters: {weight: 0.5, density: 0.5}}",
        "parameters: {normalize: true}",
        "dtype: float32",
        "seed: 3",
    ]
    (folder / "recipe.yaml").write_text("\n".join(recipe) + "\n")


def recipes(folder: Path) -> None:
    """The pool, with a recipe for every method."""
    pool(folder)
    (folder / "recipe.yaml").unlink()
    for name in RECIPES:
        (folder / f"{name}.yaml").write_text(text(name))


def _header(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in read_header(file).values():
            assert 0 <= tensor.begin <= tensor.end <= file.stat().st_size


def _open(folder: Path) -> None:
    opened = open_checkpoint(folder)
    for file in (*opened.files, *companion_files(folder)):
        assert file.resolve().is_relative_to(folder.resolve()), file
    vocabulary(folder)


def _pool(folder: Path) -> None:
    members = {name: folder / "pool" / name for name in ("math", "code")}
    open_pool(folder / "pool/reference", members)


def _recipe(folder: Path) -> None:
    load_recipe(folder / "recipe.yaml")


def _methods(folder: Path, recipes: Iterable[str] = RECIPES) -> None:
    """A damaged recipe; if the pool is damaged, a recipe that the damage decides."""
    files = [file for file in sorted(folder.rglob("*")) if is_regular(file)]
    content = {file.name: file.read_bytes() for file in files if not file.is_symlink()}
    names = list(recipes)
    damaged = [name for name in names if content.get(f"{name}.yaml") != text(name).encode()]
    drawn = names[zlib.crc32(b"".join(content.values())) % len(names)]
    _merge(folder, f"{damaged[0] if damaged else drawn}.yaml")


def _measurable(folder: Path) -> None:
    """Models that run, exemplars, and the statistics of both experts for every method."""
    from tests.probing import models

    models.write_expert(folder / "pool/reference")
    for seed, name in enumerate(("math", "code")):
        models.write_expert(folder / "pool" / name, seed=seed, near=folder / "pool/reference")
        models.write_exemplars(folder / f"pool/{name}.jsonl", seed)
    for name in MEASURED:
        (folder / f"{name}.yaml").write_text(text(name))
        api.capture(folder / f"{name}.yaml", threads=1)


def _merge(folder: Path, recipe: str = "recipe.yaml") -> None:
    out = folder / "out"
    api.merge(folder / recipe, out, threads=1)
    (report,) = api.verify(out)
    assert not [f for f in report.findings if f.check in ("headers", "numbers")], report.findings
    for file in out.rglob("*"):
        assert not file.is_symlink() and (file.is_dir() or SECRET not in file.read_bytes()), file


LAYOUT = plan_layout([(f"model.layers.{i}.w", "F32", (50,)) for i in range(4)], 500)


def _values(name: str) -> np.ndarray:
    return np.random.default_rng(sum(map(ord, name))).standard_normal(50).astype(np.float32)


def _write(out: Path, blocks: int, publish: bool) -> None:
    with Output(out, LAYOUT, "job", overwrite=True, durable=False) as output:
        for name in list(LAYOUT.slots)[:blocks]:
            if name not in output.done:
                output.write(name, 0, _values(name))
                output.finish(name)
        if publish:
            output.text("config.json", "{}")
            output.publish()


def _interrupted(folder: Path) -> None:
    folder.mkdir()
    _write(folder / "out", 3, publish=False)


def _resume(folder: Path) -> None:
    _write(folder / "out", 4, publish=True)
    for name, slot in LAYOUT.slots.items():
        content = (folder / "out" / LAYOUT.files[slot.shard]).read_bytes()
        assert content[slot.begin : slot.begin + 200] == _values(name).tobytes(), name


def _statistics(folder: Path) -> None:
    folder.mkdir()
    for block in (0, 1, None):
        arrays = {"a": np.arange(6.0), "b": np.ones(3, np.float32)}
        write_block(block_file(folder, block), {f"{block}.w": Entry("gram", "a", 7)}, arrays)


def _read_statistics(folder: Path) -> None:
    found = StatisticsFolders({"math": folder}, {})
    for tensor in found._entries["math"]:
        found.energy("math", tensor)


def _notes(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")


def _digest(folder: Path) -> None:
    file = folder / "weights"
    os.environ["SIGMERGE_CACHE"] = str(folder / "cache")
    grain, digests.GRAIN = digests.GRAIN, -(10**9)
    try:
        true = hashlib.sha256(file.read_bytes()).hexdigest()
        assert digests.file_digests([file]) == {file: true}
        rng = np.random.default_rng(list(true.encode()))  # the file is damaged by chance already
        mutate_folder(folder / "cache", rng, folder / "weights")
        assert digests.file_digests([file]) == {file: true}
        assert digests.file_digests([file]) == {file: true}
    finally:
        digests.GRAIN = grain


def _suites(folder: Path) -> None:
    folder.mkdir()
    shutil.copyfile(sorted(SHIPPED_BENCHMARKS.glob("*.yaml"))[0], folder / "suite.yaml")


def _suite(folder: Path) -> None:
    load_suite(folder / "suite.yaml")


def _answers(folder: Path) -> None:
    """The small documents of a repair: plans, scores, prompts, splits."""
    folder.mkdir()
    domains = ("math", "code")
    table = {d: dict.fromkeys(domains, 0.5) for d in domains}
    member = {"path": "pool/math", "sha256": ["0" * 64]}
    plan = {"schema": 1, "operator": "ties", "seed": 3, "reference": member,
            "experts": dict.fromkeys(domains, member), "anchor": member, "settings": {"a": [1]},
            "order": list(domains), "quota": [[1, 2], [3, 4]],
            "deficit": dict.fromkeys(domains, 0.1),
            "scores": {"experts": table, "anchor": table["math"]}, "selection": "magnitude",
            "update": "add", "scale": 1.0, "warnings": ["x"]}  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    dense = {key: plan[key] for key in ("schema", "operator", "seed", "reference", "experts")}
    (folder / "dense.json").write_text(json.dumps(dense))
    (folder / "scores.json").write_text(json.dumps(plan["scores"]))
    harness = {"results": {"gsm8k": {"exact_match,none": 0.5}, "mbpp": {"pass@1,none": 0.25}}}
    (folder / "results.json").write_text(json.dumps(harness))
    rows = [{"prompt": f"w{i}", "response": "x"} for i in range(5)]
    (folder / "probe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = {"calibration": ["1"], "evaluation": ["2"], "drawn": ["1"]}
    mark = {"domain": "math", "records": 2, "complete": True, **ids,
            "sums": {"1": "0" * 64, "2": "1" * 64},
            "sources": {"all": {"records": 2, "sha256": "0" * 64}}}  # fmt: skip
    totals = {"records": 2, "calibration": 1, "evaluation": 1, "drawn": 1}
    split = {"suite": "s", "seed": 0, "totals": totals, "benchmarks": {"b": mark}, "sha256": "0"}
    (folder / "splits.json").write_text(json.dumps(split))


def _read_answers(folder: Path) -> None:
    """Every document is read, whether or not one before it was refused."""
    table = {"experts": {"math": "results.json"}, "anchor": "results.json",
             "domains": {"math": "gsm8k/exact_match,none",
                         "code": ["mbpp/pass@1,none"]}}  # fmt: skip

    def scores() -> None:
        found = read_scores("scores.json", folder)
        check_scores(found.experts, found.anchor, ["math", "code"], "strongest")

    refused: list[SigmergeError] = []
    for reader in (
        lambda: read_plan(folder / "plan.json"),
        lambda: read_plan(folder / "dense.json"),
        scores,
        lambda: read_scores(table, folder),
        lambda: read_exemplars(folder / "probe.jsonl"),
        lambda: read_rows(folder / "probe.jsonl", File(path="probe.jsonl")),
        lambda: splits.read(folder / "splits.json"),
    ):
        try:
            reader()
        except SigmergeError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _published(folder: Path) -> None:
    pool(folder)
    api.merge(folder / "recipe.yaml", folder / "out", threads=1)
    _verify(folder)  # loads the libraries, which counts for no input


def _verify(folder: Path) -> None:
    """Shards that differ from the published ones are found, whatever else was damaged."""
    out = folder / "out"
    [report] = VerifyJob(out, Options(threads=1), deep=True).run()
    known = json.loads((out / "sigmerge/provenance.json").read_text()).get("outputs") or {}
    for name, digest in known.items():
        shard = out / name
        found = hashlib.sha256(shard.read_bytes()).hexdigest() if is_regular(shard) else None
        if name.endswith(".safetensors") and found != digest:
            assert not report.ok, f"{name} differs, and nothing was found"


def _gguf(folder: Path) -> None:
    from tests.gguf_files import write

    folder.mkdir(parents=True)
    write(folder / "model.gguf")
    _convert(folder)  # loads the libraries, which counts for no input


def _convert(folder: Path) -> None:
    """A folder that is made of the file can be read."""
    from sigmerge.lab.pools.gguf import convert

    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    open_checkpoint(convert(folder / "model.gguf", made))


TARGETS = {
    "header": Target(lambda f: checkpoint(f, 1, sharded=True), _header),
    "checkpoint": Target(lambda f: checkpoint(f, 1, sharded=True), _open),
    "pool": Target(pool, _pool, "pool"),
    "recipe": Target(pool, _recipe, "recipe.yaml", kinds=False),
    "merge": Target(pool, _merge, "."),
    "methods": Target(recipes, _methods, "."),
    "measured": Target(_measurable, partial(_methods, recipes=MEASURED), "."),
    "resume": Target(_interrupted, _resume, "."),
    "statistics": Target(_statistics, _read_statistics),
    "digests": Target(_notes, _digest, kinds=False),
    "documents": Target(_answers, _read_answers),
    "verify": Target(_published, _verify, "out"),
    "suite": Target(_suites, _suite, "suite.yaml", kinds=False),
    "gguf": Target(_gguf, _convert, "model.gguf", kinds=False),
}
