"""Kept Grams and signatures are those of what is measured now, whatever of it changes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge import kept
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import PoolError
from sigmerge.jobs.options import Options
from sigmerge.jobs.pools import block_sites, open_repair_pool
from sigmerge.jobs.signatures import signatures
from sigmerge.kept import Derivation, Given, Undeclared
from sigmerge.probing.grams import prompt_grams, read_grams
from sigmerge.recipe import load_recipe
from tests.pools import PoolOnDisk, make_pool

OWN_CODE = """
import torch
from transformers import LlamaForCausalLM

class OwnForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.register_forward_hook(lambda *call: torch.tanh({factor} * call[-1]))
"""


@pytest.fixture
def pool(tmp_path: Path, own_cache: Path) -> PoolOnDisk:
    made = make_pool(tmp_path / "pool", layers=2, tokenizer=True)
    lines = [json.dumps({"prompt": f"w{i} w{i + 2}"}) for i in range(3, 9)]
    (made.root / "probe.jsonl").write_text("\n".join(lines))
    return made


def profiled(pool: PoolOnDisk) -> Any:
    recipe = pool.recipe("task_arithmetic", repair={"probe": str(pool.root / "probe.jsonl")})
    return sigmerge.profile(recipe, trust_remote_code=True)


def grams(pool: PoolOnDisk, trust: bool = False) -> Derivation:
    math = open_checkpoint(pool.experts["math"])
    return prompt_grams(
        math, pool.reference, pool.root / "probe.jsonl", "cpu", trust, pool.reference
    )


def sums(pool: PoolOnDisk, **options: Any) -> Derivation:
    chosen = Options(threads=1, **options)
    opened = open_repair_pool(load_recipe(pool.recipe("task_arithmetic")), chosen)
    return signatures(opened, block_sites(opened), chosen)


def test_an_expert_s_own_code_is_part_of_what_is_measured(pool: PoolOnDisk) -> None:
    folder = pool.experts["math"]
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(OWN_CODE.format(factor=0.1))
    before, seen = profiled(pool), read_grams(kept.get(grams(pool, trust=True)))
    (folder / "modeling_own.py").write_text(OWN_CODE.format(factor=40.0))
    after = profiled(pool)
    assert np.abs(read_grams(kept.get(grams(pool, trust=True))) - seen).max() > 1
    assert after.views["sign"] == before.views["sign"]
    shutil.rmtree(pool.root / ".sigmerge")
    assert profiled(pool) == after


def test_a_file_that_is_not_declared_is_not_seen(pool: PoolOnDisk) -> None:
    """The code of an expert is taken from what its Grams declare."""
    wanted, whole = grams(pool), read_grams(kept.get(grams(pool)))
    (pool.experts["math"] / "model.safetensors.index.json").write_text("garbled")
    # Not declared, so that the maker of these Grams cannot find it:
    assert np.array_equal(read_grams(kept.get(wanted, again=True)), whole)
    inputs = {role: f for role, f in wanted.inputs.files.items() if "config.json" not in role}
    less = replace(wanted, inputs=kept.Inputs(inputs))
    with pytest.raises(PoolError, match=r"/math cannot be loaded for the probe pass"):
        kept.get(less)


def test_weights_that_are_not_declared_are_not_summed(pool: PoolOnDisk) -> None:
    wanted = sums(pool)
    inputs = {role: f for role, f in wanted.inputs.files.items() if not role.startswith("1/")}
    with pytest.raises(Undeclared, match=r"model\.safetensors is no declared input"):
        kept.get(replace(wanted, inputs=kept.Inputs(inputs)))


def test_what_a_killed_probe_left_is_no_part_of_the_next(
    pool: PoolOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(given: Given) -> Any:
        (given.out / "layer-7").write_text("half")
        raise KeyboardInterrupt

    wanted = grams(pool)
    with pytest.raises(KeyboardInterrupt):
        kept.get(replace(wanted, make=killed))
    monkeypatch.setattr(Derivation, "code", "the same")
    entry = kept.get(wanted)
    assert [file.name for file in entry.folder.iterdir()] == ["grams.npy"]
