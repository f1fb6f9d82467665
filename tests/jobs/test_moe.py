"""`sigmerge moe`, beside mergekit-moe 0.1.5 and transformers: the same tensors, and they run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import sigmerge
from sigmerge.core.philox import key_of, normal
from sigmerge.errors import PoolError, RecipeError, SigmergeError
from tests.command_line import sigmerge as command
from tests.pools import PoolOnDisk, read_weights, weight_bytes

DEPTH = 3
PROMPTS = {
    "math": {"positive_prompts": ["solve this", "how many"], "negative_prompts": ["a poem"]},
    "coding": {"positive_prompts": ["def f(x)"]},
    "safety": {"positive_prompts": ["is it safe", "may I"]},
}
BY_ONE = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def write_words(folder: Path) -> Path:
    """A tokenizer that has a token for every word of the prompts."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    texts = [text for sides in PROMPTS.values() for side in sides.values() for text in side]
    words = dict.fromkeys(["<unk>", "<s>", "</s>", *" ".join(texts).split()])
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PoolOnDisk]:
    """Tiny dense models of a kind with one tokenizer, made once."""
    import transformers

    made: dict[str, PoolOnDisk] = {}
    texts = write_words(tmp_path_factory.mktemp("texts"))

    def pool(kind: str) -> PoolOnDisk:
        if kind in made:
            return made[kind]
        root = tmp_path_factory.mktemp(kind)
        size = {
            "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
            "num_key_value_heads": 1, "num_hidden_layers": DEPTH, "vocab_size": 48,
            "max_position_embeddings": 64, "head_dim": 8, "rope_theta": 5000.0,
        }  # fmt: skip
        config = transformers.AutoConfig.for_model(kind, **size)
        experts = {}
        for seed, name in enumerate(("reference", *PROMPTS)):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.save_pretrained(root / name)
            shutil.copytree(texts, root / name, dirs_exist_ok=True)
            experts[name] = root / name
        made[kind] = PoolOnDisk(root, experts.pop("reference"), experts)
        return made[kind]

    return pool


def recipe(pool: PoolOnDisk, names: str = "math coding", **more: Any) -> dict[str, Any]:
    experts = [{"source_model": str(pool.experts[n]), **PROMPTS[n]} for n in names.split()]
    return {"base_model": str(pool.reference), "dtype": "float32", "experts": experts, **more}


def shared(pool: PoolOnDisk, **more: Any) -> list[dict[str, Any]]:
    return [{"source_model": str(pool.reference), **more}]


def by_mergekit(content: dict[str, Any], out: Path) -> dict[str, Any]:
    """mergekit's own build, in this process."""
    moe = pytest.importorskip("mergekit.moe.config")
    options = pytest.importorskip("mergekit.options")
    script = pytest.importorskip("mergekit.scripts.moe")
    config = moe.MoEMergeConfig.model_validate(content)
    script.build(config, str(out), options.MergeOptions(quiet=True), device="cpu")
    return read_weights(out)


def joined(weights: dict[str, Any]) -> dict[str, Any]:
    """Experts stacked as transformers 5 has them, which mergekit writes for two families."""
    found: dict[str, Any] = {}
    parts: dict[str, dict[int, dict[str, Any]]] = {}
    for name, values in weights.items():
        name = name.replace("block_sparse_moe", "mlp")
        one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if one is None:
            found[name] = values
        else:
            role = BY_ONE.get(one[3], one[3])
            parts.setdefault(one[1], {}).setdefault(int(one[2]), {})[role] = values
    for place, experts in parts.items():
        each = [experts[number] for number in sorted(experts)]
        both = [np.concatenate([e["gate_proj"], e["up_proj"]]) for e in each]
        found[f"{place}.gate_up_proj"] = np.stack(both)
        found[f"{place}.down_proj"] = np.stack([e["down_proj"] for e in each])
    return found


CASES: dict[str, tuple[str, Callable[[PoolOnDisk], dict[str, Any]]]] = {
    "mixtral": ("llama", lambda pool: {}),
    "mixtral of mistral": ("mistral", lambda pool: {"experts_per_token": 1}),
    "deepseek": (
        "llama", lambda pool: {"architecture": "deepseek", "shared_experts": shared(pool)}
    ),
    "qwen2": ("qwen2", lambda pool: {"shared_experts": shared(pool, positive_prompts=["any"])}),
    "qwen2 of llama": (
        "llama",
        lambda pool: {
            "architecture": "qwen",
            "shared_experts": shared(pool, positive_prompts=["any"], residual_scale=0.1),
        },
    ),
    "qwen3": ("qwen3", lambda pool: {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_tensors_are_mergekits_and_the_model_generates(
    case: str, dense: Callable[[str], PoolOnDisk], tmp_path: Path
) -> None:
    import transformers

    kind, more = CASES[case]
    pool = dense(kind)
    content = recipe(pool, gate_mode="cheap_embed", **more(pool))
    done = sigmerge.moe(content, tmp_path / "ours", threads=1)
    theirs = joined(by_mergekit(content, tmp_path / "theirs"))
    ours = joined(read_weights(tmp_path / "ours"))
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        close = 1e-6 if "gate.weight" in name else 0
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=close, err_msg=name)
    one, other = (
        json.loads((tmp_path / n / "config.json").read_text()) for n in ("ours", "theirs")
    )
    told = {"transformers_version", "dtype", "torch_dtype", "rope_theta", "rope_parameters",
            "layer_types", "pad_token_id"}  # fmt: skip
    assert {k: v for k, v in one.items() if k not in told and k in other} == {
        k: other[k] for k in one if k not in told and k in other
    }
    assert all(report.ok for report in sigmerge.verify(tmp_path / "ours", deep=True))
    assert done.plan.operator == "moe"
    if case == "deepseek":  # its code is the model's own on the hub; transformers has none
        return
    loaded = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / n, dtype=torch.float32)
        for n in ("ours", "theirs")
    ]
    ids = torch.tensor([[5, 9, 3, 7]])
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in loaded]
        written = loaded[0].generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert written.shape == (1, 8)


@pytest.mark.parametrize("mode", ["hidden", "hidden_avg"])
def test_rows_are_hidden_states_of_the_prompts(
    mode: str, dense: Callable[[str], PoolOnDisk], tmp_path: Path
) -> None:
    """Against whole passes of transformers in float32; mergekit's are in bfloat16, and padded."""
    import transformers

    pool = dense("llama")
    content = recipe(pool, gate_mode=mode)
    sigmerge.moe(content, tmp_path / "ours")
    ours = read_weights(tmp_path / "ours")
    tokenizer = transformers.AutoTokenizer.from_pretrained(pool.reference)
    model = transformers.AutoModelForCausalLM.from_pretrained(pool.reference, dtype=torch.float32)

    def mean(texts: list[str]) -> torch.Tensor:
        found = []
        for text in texts:
            ids = tokenizer((tokenizer.bos_token or "") + text, add_special_tokens=False)[
                "input_ids"
            ]
            with torch.no_grad():
                states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[:-1]
            each = torch.stack([s[0].mean(0) if mode == "hidden_avg" else s[0, -1] for s in states])
            found.append(each)
        return torch.stack(found).mean(0)

    for at, expert in enumerate(content["experts"]):
        rows = mean(expert["positive_prompts"])
        if expert.get("negative_prompts"):
            rows = rows - mean(expert["negative_prompts"])
        rows = rows / rows.norm(dim=-1, keepdim=True)
        for layer in range(DEPTH):
            row = ours[f"model.layers.{layer}.block_sparse_moe.gate.weight"][at]
            np.testing.assert_allclose(row, rows[layer].numpy(), atol=2e-6)
    if mode == "hidden":
        theirs = by_mergekit(content, tmp_path / "theirs")
        for layer in range(DEPTH):
            rows = theirs[f"model.layers.{layer}.mlp.gate.weight"]
            mine = ours[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
            np.testing.assert_allclose(mine, rows, atol=0.02)  # bfloat16 has 8 bits


def _has_matrices(block: Any) -> bool:
    return any(p.ndim > 1 and p.device.type != "meta" for p in block.parameters())


def test_memory_is_that_of_one_block(
    dense: Callable[[str], PoolOnDisk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two blocks of the base have weights at once."""
    from sigmerge.probing import skeleton

    held: list[int] = []
    fill = skeleton.Skeleton._fill

    def watched(self: Any, part: Any, *given: Any) -> None:
        fill(self, part, *given)
        full = [b for b in self.blocks if _has_matrices(b)]
        held.append(len(full))

    monkeypatch.setattr(skeleton.Skeleton, "_fill", watched)
    content = recipe(dense("llama"), gate_mode="hidden", seed=1)
    content["experts"][0]["positive_prompts"] = ["nobody asked this before"]
    sigmerge.moe(content, tmp_path / "out")
    assert max(held) == 1 and len(held) >= 2 * (DEPTH - 1)


def test_the_same_bytes_by_any_threads_killed_and_resumed(
    dense: Callable[[str], PoolOnDisk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sigmerge.checkpoints.writer import Output

    pool = dense("llama")
    content = recipe(pool, "math coding safety math", gate_mode="random", seed=3)
    for at, expert in enumerate(content["experts"]):
        expert |= {"noise_scale": 0.01 * at, "residual_scale": 1 - 0.1 * at}
    file = tmp_path / "moe.yaml"
    file.write_text(yaml.safe_dump(content))
    sigmerge.moe(file, tmp_path / "one", threads=1)
    sigmerge.moe(file, tmp_path / "three", threads=3)
    assert weight_bytes(tmp_path / "one") == weight_bytes(tmp_path / "three")
    finish, count = Output.finish, iter(range(100))

    def killed(self: Any, *given: Any, **how: Any) -> None:
        if next(count) == 2:
            raise KeyboardInterrupt
        finish(self, *given, **how)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Output, "finish", killed)
        sigmerge.moe(file, tmp_path / "killed", threads=1)
    done = sigmerge.moe(file, tmp_path / "killed", threads=1)
    assert len(done.provenance.blocks_resumed) == 2
    assert weight_bytes(tmp_path / "one") == weight_bytes(tmp_path / "killed")
    weights = read_weights(tmp_path / "one")
    own = read_weights(pool.experts["coding"])["model.layers.1.mlp.down_proj.weight"]
    noise = np.empty(own.size, np.float32)
    name = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    normal(key_of(3, "noise", name), 0, noise)
    np.testing.assert_allclose(
        weights[name], (own + np.float32(0.01) * noise.reshape(own.shape)) * np.float32(0.9),
        rtol=1e-6, atol=1e-7,
    )  # fmt: skip
    first = weights["model.layers.0.block_sparse_moe.experts.0.w1.weight"]
    last = weights["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    assert np.abs(first - last).max() > 0.01  # the same model, with noise of its own
    other = sigmerge.moe(file, tmp_path / "other", seed=4)
    assert other.plan.seed == 4
    assert weight_bytes(tmp_path / "one") != weight_bytes(tmp_path / "other")


def test_noise_is_normal() -> None:
    drawn = np.empty(200_000, np.float32)
    normal((1, 2), 0, drawn)
    assert abs(drawn.mean()) < 0.01 and abs(drawn.std() - 1) < 0.01
    again = np.empty(1000, np.float32)
    normal((1, 2), 5000, again)
    assert np.array_equal(again, drawn[5000:6000])


def test_a_dry_run_says_what_is_read_and_writes_nothing(
    dense: Callable[[str], PoolOnDisk], tmp_path: Path
) -> None:
    file = tmp_path / "moe.yaml"
    content = recipe(dense("mistral"), gate_mode="hidden_avg")
    file.write_text(yaml.safe_dump(content))
    ran = command("moe", file, tmp_path / "out", "--dry-run")
    assert ran.code == 0, ran.err
    assert "gates: family Mixtral, experts 2, mode hidden_avg, prompts 4, state to be" in ran.out
    assert not (tmp_path / "out").exists()
    assert command("moe", file, tmp_path / "out").code == 0
    assert "state kept" in command("moe", file, tmp_path / "out", "--dry-run", "--overwrite").out
    report = sigmerge.verify(tmp_path / "out", deep=True, blocks=None)[0]
    assert report.ok
    stored = read_weights(tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "Mixtral of 2 experts, 2 chosen for each token" in card and len(stored) > 10
    assert "- base of all but the experts: " in card and "- expert `math`: " in card


def test_wrong_files_are_refused_before_a_tensor_is_read(
    dense: Callable[[str], PoolOnDisk], tmp_path: Path
) -> None:
    llama, qwen = dense("llama"), dense("qwen2")

    def refused(content: dict[str, Any], error: type[SigmergeError] = RecipeError) -> str:
        with pytest.raises(error) as caught:
            sigmerge.moe(content, tmp_path / "out")
        return str(caught.value)

    same = recipe(llama)
    same["experts"][0] |= {"negative_prompts": []} | PROMPTS["coding"]
    assert "all have the same prompts" in refused(same)
    assert "experts_per_token: is 3, and there are 2" in refused(recipe(llama, experts_per_token=3))
    none = recipe(llama)
    del none["experts"][1]["positive_prompts"]
    assert "experts[1].positive_prompts: is missing" in refused(none)
    assert "gate_mode: must be 'hidden'" in refused(recipe(llama, gate_mode="best"))
    mixed = recipe(llama)
    mixed["experts"][0]["source_model"] = str(qwen.experts["math"])
    assert "of different kinds (llama, qwen2)" in refused(mixed, PoolError)
    assert "is no kind of mixture" in refused(recipe(llama, architecture="jamba"), PoolError)
    assert "give one under shared_experts" in refused(recipe(qwen), PoolError)
    two = recipe(llama, shared_experts=[*shared(llama), *shared(llama)])
    assert "has one shared expert, not 2" in refused(two, PoolError)
    gate = recipe(qwen, shared_experts=shared(qwen))
    assert "give it positive_prompts" in refused(gate, PoolError)
