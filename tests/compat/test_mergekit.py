"""Scripts that call mergekit by its Python names or its command, beside mergekit itself."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import sigmerge
from sigmerge.compat.mergekit import MergeConfiguration, MergeOptions, parse_kmb, run_merge
from sigmerge.errors import RecipeError
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, make_pool, read_weights, weight_bytes
from tests.test_recipe_forms import piped


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> PoolOnDisk:
    return make_pool(tmp_path_factory.mktemp("pool"), tokenizer=True)


def content(pool: PoolOnDisk) -> dict[str, Any]:
    models = [
        {"model": str(folder), "parameters": {"weight": 0.4, "density": 0.5}}
        for folder in pool.experts.values()
    ]
    return {
        "merge_method": "ties",
        "base_model": str(pool.reference),
        "models": models,
        "parameters": {"normalize": True},
        "dtype": "float32",
    }


def test_the_options_are_mergekits() -> None:
    theirs = pytest.importorskip("mergekit.options").MergeOptions
    ours = {field.name: field.default for field in fields(MergeOptions)}
    assert ours == {name: field.default for name, field in theirs.model_fields.items()}


def test_a_script_of_mergekits_makes_the_same_model(pool: PoolOnDisk, tmp_path: Path) -> None:
    """Both by the same lines; only the module that they come from differs."""
    config = pytest.importorskip("mergekit.config")
    merge = pytest.importorskip("mergekit.merge")
    options = pytest.importorskip("mergekit.options")
    text = yaml.safe_dump(content(pool))
    for out, names in (
        ("theirs", (config.MergeConfiguration, options.MergeOptions, merge.run_merge)),
        ("ours", (MergeConfiguration, MergeOptions, run_merge)),
    ):
        configuration, how, run = names
        made = configuration.model_validate(yaml.safe_load(text))
        given = how(cuda=False, copy_tokenizer=True, lazy_unpickle=True, low_cpu_memory=False)
        run(made, str(tmp_path / out), options=given)
    theirs, ours = read_weights(tmp_path / "theirs"), read_weights(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5, atol=1e-7)
    kept = yaml.safe_load((tmp_path / "ours/mergekit_config.yml").read_text())
    assert kept == yaml.safe_load(text)
    assert all(report.ok for report in sigmerge.verify(tmp_path / "ours"))


def test_what_is_not_needed_is_said_with_its_reason(
    pool: PoolOnDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = MergeConfiguration.model_validate(content(pool))
    assert made.merge_method == "ties" and made.slices is None
    with caplog.at_level(logging.INFO, "sigmerge"):
        done = run_merge(made, tmp_path / "out", MergeOptions(clone_tensors=True, random_seed=3))
    assert "clone_tensors is not needed: every tensor is written by itself" in caplog.text
    assert done.plan.seed == 3
    again = run_merge(made, tmp_path / "out")  # as there, a folder is replaced
    assert again.plan.seed == 0


def test_the_command_takes_every_option(pool: PoolOnDisk, tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(content(pool)))
    flags = ["--no-cuda", "--lazy-unpickle", "--allow-crimes", "--copy-tokenizer", "-q",
             "--out-shard-size", "1B", "-j", "2", "--low-cpu-memory", "--random-seed", "7",
             "--lora-merge-cache", "x", "--no-safe-serialization", "--write-threads", "2",
             ]  # fmt: skip
    ran = command("mergekit", "yaml", file, tmp_path / "out", *flags)
    assert ran.code == 0 and ran.out == ""
    named = [line.split()[1] for line in ran.err.splitlines() if line.startswith("note:")]
    assert named == ["allow_crimes", "lora_merge_cache", "low_cpu_memory", "safe_serialization",
                     "write_threads"]  # fmt: skip
    run_merge(yaml.safe_load(file.read_text()), tmp_path / "same", MergeOptions(random_seed=7))
    assert weight_bytes(tmp_path / "out") == weight_bytes(tmp_path / "same")
    assert (tmp_path / "out/mergekit_config.yml").read_text() == file.read_text()
    with piped(file.read_text(), 0) as given:
        told = command("mergekit", "yaml", given, tmp_path / "told", "--json", "-q").json
    assert told["out"] == str(tmp_path / "told")
    assert (tmp_path / "told/mergekit_config.yml").read_text() == file.read_text()
    wrong = command("mergekit", "yaml", file, tmp_path / "out", "--out-shard-size", "many")
    assert wrong.code == 2 and "500M" in wrong.err


def test_sizes() -> None:
    assert [parse_kmb(text) for text in ("5B", "500m", "7", 12)] == [5 * 10**9, 5 * 10**8, 7, 12]
    with pytest.raises(RecipeError, match="5B"):
        parse_kmb("much")
