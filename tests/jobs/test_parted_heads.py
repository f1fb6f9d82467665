"""Merges of a tied model of which an expert's adapter parts the head from the embedding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import SigmergeError
from sigmerge.merge3.candidate import stored_weights
from tests.adapters import merged, write_adapter
from tests.pools import (
    make_pool,
    read_weights,
    weight_bytes,
    write_member,
    write_tokenizer,
)

torch = pytest.importorskip("torch")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PROMPT = torch.tensor([[3, 9, 4, 17]])


@dataclass(frozen=True)
class Parted:
    """A tied reference, an expert that is stored, and two adapters, as they are and stored."""

    reference: Path
    experts: dict[str, Path]
    stored: dict[str, Path]

    def recipe(self, experts: dict[str, Path], method: str, **more: Any) -> dict[str, Any]:
        models = [
            {"model": str(path), "name": name, "parameters": {"weight": 0.3 + 0.1 * i}}
            for i, (name, path) in enumerate(experts.items())
        ]
        base = {} if method == "linear" else {"base_model": str(self.reference)}
        return {"merge_method": method, **base, "models": models, **more}


def made(weights: dict[str, Any], adapter: Path) -> dict[str, Any]:
    """What a tied model computes by with an adapter of embedding or head, which part."""
    return merged({**weights, HEAD: weights[EMBEDDING]}, adapter)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Parted:
    root = tmp_path_factory.mktemp("parted")
    tied = make_pool(root / "pool", experts=1, tied=True, tokenizer=True)
    weights = read_weights(tied.reference)
    head = {**weights, HEAD: weights[EMBEDDING]}
    adapters = {
        "table": write_adapter(root / "table", tied.reference, weights, seed=1,
                               modules=("q_proj",), embeddings=("embed_tokens",)),
        "mouth": write_adapter(root / "mouth", tied.reference, head, seed=2,
                               modules=("v_proj", "lm_head")),
    }  # fmt: skip
    stored = {
        name: write_member(root / "stored" / name, made(weights, folder), tokenizer=True)
        for name, folder in adapters.items()
    }
    plain = tied.experts["math"]
    experts = {name: Path(f"{tied.reference}+{folder}") for name, folder in adapters.items()}
    return Parted(tied.reference, {"plain": plain, **experts}, {"plain": plain, **stored})


def shards(folder: Path) -> dict[str, bytes]:
    files = weight_bytes(folder)
    return {name: content for name, content in files.items() if name.endswith(".safetensors")}


def logits(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", output_loading_info=True
    )
    assert not any(found.values())
    return model.eval()(PROMPT).logits


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("linear", {}),
        ("ties", {"parameters": {"density": 0.4}}),
        ("task_arithmetic", {"repair": {"shares": {"plain": 0.3, "table": 0.3, "mouth": 0.4},
                                        "capacity": 0.3}}),
    ],
)  # fmt: skip
def test_both_tensors_are_merged_where_one_expert_has_two(
    pool: Parted, tmp_path: Path, method: str, more: dict[str, Any]
) -> None:
    """Beside the merge of the models that the adapters make, which have both tensors."""
    for side, experts in (("adapters", pool.experts), ("stored", pool.stored)):
        sigmerge.merge(pool.recipe(experts, method, **more), tmp_path / side)
    assert shards(tmp_path / "adapters") == shards(tmp_path / "stored")
    config = json.loads((tmp_path / "adapters" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    weights = read_weights(tmp_path / "adapters")
    assert np.abs(weights[HEAD] - weights[EMBEDDING]).max() > 1e-3
    torch.testing.assert_close(logits(tmp_path / "adapters"), logits(tmp_path / "stored"))
    (report,) = sigmerge.verify(tmp_path / "adapters", deep=True, blocks=None)
    assert not report.findings


def test_a_weighted_mean_of_each_of_the_two(pool: Parted, tmp_path: Path) -> None:
    """By NumPy, from the adapters' own files."""
    experts = dict(list(pool.experts.items())[1:])
    recipe = pool.recipe(experts, "linear", parameters={"normalize": False})
    sigmerge.merge(recipe, tmp_path / "out")
    base = read_weights(pool.reference)
    parts = [made(base, Path(str(path).partition("+")[2])) for path in experts.values()]
    found = read_weights(tmp_path / "out")
    for name in (HEAD, EMBEDDING):
        wanted = sum(
            w * part[name].astype(np.float64) for w, part in zip((0.3, 0.4), parts, strict=True)
        )
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, atol=1e-7)


def test_a_vocabulary_moves_the_rows_of_both(pool: Parted, tmp_path: Path) -> None:
    other = write_member(tmp_path / "other", read_weights(pool.experts["plain"]), tied=True)
    write_tokenizer(other)
    words = json.loads((other / "tokenizer.json").read_text())
    words["model"]["vocab"] |= {"w5": 6, "w6": 5}
    (other / "tokenizer.json").write_text(json.dumps(words))
    experts = {**dict(list(pool.experts.items())[1:]), "other": other}
    recipe = pool.recipe(experts, "linear", tokenizer_source=str(other))
    sigmerge.merge(recipe, tmp_path / "moved")
    found = read_weights(tmp_path / "moved")
    parts = [stored_weights(open_checkpoint(path)) for path in list(experts.values())[:2]]
    for name in (HEAD, EMBEDDING):
        last = read_weights(other)[EMBEDDING].astype(np.float64)
        rows = [part[name].astype(np.float64).copy() for part in parts]
        for row in rows:
            row[[5, 6]] = row[[6, 5]]
        total = 0.3 * rows[0] + 0.4 * rows[1] + 0.5 * last
        np.testing.assert_allclose(found[name], total / 1.2, rtol=1e-5, atol=1e-6)


def test_what_is_extracted_of_a_parted_model_makes_it_again(pool: Parted, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sigmerge.extract(pool.stored["table"], tmp_path / "lora", base=pool.reference)
    both = f"{pool.reference}+{tmp_path / 'lora'}"
    sigmerge.merge({"merge_method": "passthrough", "models": [{"model": both}]}, tmp_path / "again")
    torch.testing.assert_close(logits(tmp_path / "again"), logits(pool.stored["table"]))
    base = AutoModelForCausalLM.from_pretrained(pool.reference, dtype="float32")
    in_use = PeftModel.from_pretrained(base, str(tmp_path / "lora")).eval()
    torch.testing.assert_close(in_use(PROMPT).logits, logits(pool.stored["table"]))


def test_a_loaded_model_answers_by_both(pool: Parted) -> None:
    from sigmerge.merge3.scoring import _load
    from sigmerge.probing.generate import HfModel

    for name in ("table", "mouth"):
        model = HfModel(pool.experts[name], "float32", 1).model
        torch.testing.assert_close(model(PROMPT).logits, logits(pool.stored[name]))
    for name in ("plain", "table", "plain"):  # the candidates of a search, one after another
        _load(model, stored_weights(open_checkpoint(pool.experts[name])))
        torch.testing.assert_close(model(PROMPT).logits, logits(pool.stored[name]))


def test_gradients_are_taken_of_each_of_the_two(pool: Parted, tmp_path: Path) -> None:
    """Fisher's statistics of a parted model are those of the model that its adapter makes."""
    examples = tmp_path / "examples.jsonl"
    examples.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1} w9"}) + "\n"
                                for i in range(3, 9)))  # fmt: skip
    for side, experts in (("adapters", pool.experts), ("stored", pool.stored)):
        chosen = {name: experts[name] for name in ("table", "mouth")}
        recipe = pool.recipe(chosen, "fisher")
        for model in recipe["models"]:
            model["exemplars"] = str(examples)
        sigmerge.merge(recipe, tmp_path / side)
    assert shards(tmp_path / "adapters") == shards(tmp_path / "stored")


def test_a_stack_of_parted_layers_has_both(pool: Parted, tmp_path: Path) -> None:
    for side, experts in (("adapters", pool.experts), ("stored", pool.stored)):
        ranges = {"table": [0, 2], "plain": [1, 2]}
        pieces = [
            {"sources": [{"model": str(experts[name]), "layer_range": layers}]}
            for name, layers in ranges.items()
        ]
        sigmerge.merge({"merge_method": "passthrough", "slices": pieces}, tmp_path / side)
    torch.testing.assert_close(logits(tmp_path / "adapters"), logits(tmp_path / "stored"))


def test_an_embedding_of_more_rows_than_the_head_is_refused(pool: Parted, tmp_path: Path) -> None:
    weights = read_weights(pool.reference)
    longer = {EMBEDDING: np.vstack([weights[EMBEDDING], weights[EMBEDDING][:2]])}
    adapter = write_adapter(
        tmp_path / "lora", pool.reference, weights, whole=longer, modules_to_save=["embed_tokens"]
    )
    with pytest.raises(SigmergeError, match="50 rows, and the head has 48"):
        open_checkpoint(Path(f"{pool.reference}+{adapter}"))
