"""Fine-tuning of a tiny reference: what is learnt, what is resumed, what is refused."""

from __future__ import annotations

import json
import resource
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.errors import OutputError, PoolError, RecipeError, SigmergeWarning
from sigmerge.files.digests import file_digests
from sigmerge.files.locks import only_writer
from sigmerge.jobs.steps import TrainStep
from sigmerge.lab.pools import train as training
from sigmerge.lab.pools.train import FineTuning, RealTraining, fit, tokenized
from sigmerge.progress import silent
from tests.evaluation.tiny import write_tiny

SETTINGS = FineTuning(steps=30, rate=1e-2, batch=8, warmup=2, longest=64)


@pytest.fixture
def made(tmp_path: Path) -> RealTraining:
    data = tmp_path / "data"
    (data / "train").mkdir(parents=True)
    for domain, word in (("math", "seven"), ("safety", "no")):
        rows = [{"prompt": f"say {domain} {i}", "response": word} for i in range(20)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (data / "train" / f"{domain}.jsonl").write_text(text)
    (data / "probe.jsonl").write_text('{"prompt": "x"}\n')
    reference = write_tiny(tmp_path / "tiny")
    return RealTraining(reference, data, tmp_path / "pool", SETTINGS)


def answer(folder: Path, prompt: str) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    new = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.campaign
def test_experts_trained_side_by_side_are_those_trained_in_turn(
    made: RealTraining, tmp_path: Path
) -> None:
    short = replace(made, settings=replace(SETTINGS, steps=4))
    one = replace(short, out=tmp_path / "one").run(silent)
    seen: list[tuple[str, int, int]] = []
    two = replace(short, out=tmp_path / "two", jobs=2).run(lambda *at: seen.append(at))
    for domain in ("math", "safety"):
        file = f"{domain}/model.safetensors"
        assert (one / file).read_bytes() == (two / file).read_bytes()
    for domain in ("math", "safety"):
        steps = [done for stage, done, total in seen if stage == domain]
        assert steps and steps == sorted(steps) and steps[-1] == 4
    assert [at for at in seen if at[0] == "experts"][-1] == ("experts", 2, 2)
    assert not list((two / "training").glob(".*"))


def test_every_expert_learns_its_own_answer(made: RealTraining) -> None:
    (step,) = made.describe().steps
    assert isinstance(step, TrainStep) and not made.out.exists()
    assert step.steps == {"math": 30, "safety": 30}
    pool = made.run(silent)
    written = [open_checkpoint(pool / name).nbytes for name in ("reference", "math", "safety")]
    assert step.bytes_to_write == sum(written)
    assert made.describe().steps[0].bytes_to_write == 0
    assert answer(pool / "math", "say math 31") == "seven"
    assert answer(pool / "safety", "say safety 31") == "no"
    assert answer(pool / "reference", "say math 31") != "seven"
    record = json.loads((pool / "training/math.json").read_text())
    assert [line["step"] for line in record["losses"]] == list(range(3, 31, 3))
    assert record["losses"][-1]["loss"] < record["losses"][0]["loss"] / 4
    assert record["weights"] == list(file_digests([pool / "math/model.safetensors"]).values())
    assert (pool / "probe.jsonl").read_text() == (made.data / "probe.jsonl").read_text()
    stored = json.loads((pool / "math/config.json").read_text())
    assert stored["dtype"] == "bfloat16"


def test_a_missing_expert_is_trained_and_others_are_not(made: RealTraining) -> None:
    pool = made.run(silent)
    before = {name: (pool / name / "model.safetensors").read_bytes() for name in ("math", "safety")}
    kept = (pool / "math/model.safetensors").stat().st_mtime_ns
    shutil.rmtree(pool / "safety")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers, "__version__", "0.1")
        with pytest.warns(SigmergeWarning, match="math: trained by other code or libraries"):
            made.run(silent)
    assert (pool / "math/model.safetensors").stat().st_mtime_ns == kept
    assert (pool / "safety/model.safetensors").read_bytes() == before["safety"]
    other = replace(made, settings=replace(SETTINGS, seed=1))
    for domains in ((), ("safety",)):
        with pytest.raises(OutputError, match="math: trained with other settings"):
            replace(other, domains=domains).run(silent)
    elsewhere = replace(other, out=made.out.with_name("other"), domains=("math",)).run(silent)
    assert (elsewhere / "math/model.safetensors").read_bytes() != before["math"]
    assert not (elsewhere / "safety").exists()


def test_a_pool_goes_on_with_its_own_reference_and_data(made: RealTraining, tmp_path: Path) -> None:
    """Experts of one reference, whose items no expert of the pool was trained on."""
    short = replace(made, settings=replace(SETTINGS, steps=3), domains=("math",))
    short.run(silent)
    other = shutil.copytree(made.data, tmp_path / "other")
    (other / "probe.jsonl").write_text('{"prompt": "y"}\n')
    tiny = shutil.copytree(made.reference, tmp_path / "longer")
    (tiny / "generation_config.json").write_text('{"max_length": 7}')
    rest = replace(short, domains=("safety",))
    for changed in (replace(rest, data=other), replace(rest, reference=tiny)):
        with pytest.raises(OutputError, match="begun with another reference or other data"):
            changed.run(silent)
    assert not (made.out / "safety").exists()
    rest.run(silent)
    assert (made.out / "training/safety.json").is_file()
    more = shutil.copytree(made.data, tmp_path / "more")
    with (more / "train/math.jsonl").open("a") as file:
        file.write('{"prompt": "x", "response": "y"}\n')
    with pytest.raises(OutputError, match="math: trained with other data"):
        replace(short, data=more).run(silent)


def test_a_disk_that_is_full_is_no_fault_and_leaves_no_expert(made: RealTraining) -> None:
    """A limit on the size of files stands for the disk; there are no weights without room."""
    short = replace(made, settings=replace(SETTINGS, steps=3))
    replace(short, domains=("math",)).run(silent)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OutputError, match=r"(?i)safety: cannot be written .*too large"):
            replace(short, domains=("safety",)).run(silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (made.out / "safety").exists()
    assert not (made.out / "training/safety.json").exists()
    short.run(silent)
    assert sorted(file.name for file in made.out.glob("training/*.json")) == [
        "math.json",
        "safety.json",
    ]


def test_a_training_that_diverges_makes_no_expert(made: RealTraining) -> None:
    wild = replace(made, settings=replace(SETTINGS, steps=6, rate=1e30), domains=("math",))
    with pytest.raises(
        PoolError, match=r"math: the training has lost its weights .* smaller --rate"
    ):
        wild.run(silent)
    assert not (made.out / "math").exists() and not (made.out / "training/math.json").exists()


def test_weights_are_looked_at_after_the_last_step(made: RealTraining) -> None:
    """The losses do not show all: here of a weight that no batch reads."""
    model = AutoModelForCausalLM.from_pretrained(made.reference, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = torch.nan
    settings = replace(SETTINGS, steps=3)
    with pytest.raises(PoolError, match="by step 3"):
        fit(model, [([1, 2, 3], 1)] * 8, 0, settings, "math", silent)


def test_only_responses_are_learnt(made: RealTraining) -> None:
    """The first loss is the mean over the responses' tokens and their end, each row alone."""
    tokenizer = AutoTokenizer.from_pretrained(made.reference)
    pairs = tokenized(tokenizer, made.data / "train/math.jsonl", 64)[:3]
    model = AutoModelForCausalLM.from_pretrained(made.reference, dtype=torch.float32)
    losses = []
    for ids, begin in pairs:
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[begin:-1]) == "seven"
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, begin - 1 : -1]
        losses += cross_entropy(logits, torch.tensor(ids[begin:]), reduction="none").tolist()
    one = FineTuning(steps=1, rate=1e-9, batch=3, warmup=0)
    [first] = fit(model, pairs, tokenizer.eos_token_id, one, "math", silent)
    assert first["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-3)


def test_a_batch_that_does_not_fit_is_halved(
    made: RealTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses and, but for rounding, the same weights in pieces of two pairs."""
    tokenizer = AutoTokenizer.from_pretrained(made.reference)
    pairs = tokenized(tokenizer, made.data / "train/math.jsonl", 64)
    few = replace(SETTINGS, steps=4, rate=1e-3)
    trained, rows, real, most = [], [], training._batch, [8]

    def limited(some: Any, padding: int) -> Any:
        if len(some) > most[0]:
            raise torch.OutOfMemoryError("full")
        rows.append(len(some))
        return real(some, padding)

    monkeypatch.setattr(training, "_batch", limited)
    for most[0] in (8, 2):
        model = AutoModelForCausalLM.from_pretrained(made.reference, dtype=torch.float32)
        losses = fit(model, pairs, tokenizer.eos_token_id, few, "math", silent)
        trained.append((losses, model.get_input_embeddings().weight.detach()))
    assert rows == [8] * 4 + [2] * 16
    assert [line["loss"] for line in trained[0][0]] == pytest.approx(
        [line["loss"] for line in trained[1][0]], abs=1e-3
    )
    assert torch.allclose(trained[0][1], trained[1][1], atol=1e-4)
    most[0] = 0
    with pytest.raises(PoolError, match="not even one pair"):
        fit(model, pairs, tokenizer.eos_token_id, few, "math", silent)


def _unlike(made: RealTraining) -> tuple[Any, list[tuple[list[int], int]]]:
    """A fresh model, and pairs whose responses are of different lengths."""
    model = AutoModelForCausalLM.from_pretrained(made.reference, dtype=torch.float32)
    return model, [([1 + i % 7, *range(2, 3 + i)], 1) for i in range(8)]


def test_the_pieces_of_a_batch_give_its_gradients(made: RealTraining) -> None:
    """Whatever the pieces: a long response weighs as much as it has tokens."""
    found = []
    for at_once in (8, 3):
        model, pairs = _unlike(made)
        loss = training._backward(model, pairs, 0, at_once)
        found.append((loss, [weight.grad for weight in model.parameters()]))
    (whole, gradients), (pieces, others) = found
    assert torch.allclose(whole, pieces)
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_batch_that_does_not_fit_halfway_begins_anew(
    made: RealTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of the pieces that did fit are not counted twice."""
    few, real = replace(SETTINGS, steps=3, rate=1e-3), training._batch
    trained, rows = [], list[int]()

    def limited(some: Any, padding: int) -> Any:
        rows.append(len(some))
        if rows in ([8], [8, 4, 4, 4, 4]):  # the first batch at once, then the end of the second
            raise torch.OutOfMemoryError("full")
        return real(some, padding)

    for batch in (real, limited):
        monkeypatch.setattr(training, "_batch", batch)
        model, pairs = _unlike(made)
        fit(model, pairs, 0, few, "math", silent)
        trained.append(model.get_input_embeddings().weight.detach())
    assert rows == [8, 4, 4, 4, 4, *[2] * 8]
    assert torch.allclose(*trained, atol=1e-5)


def test_the_seed_and_the_domain_decide_the_batches(made: RealTraining) -> None:
    _, pairs = _unlike(made)
    drawn = [
        training._draws(pairs, replace(SETTINGS, batch=3, seed=seed), domain)
        for seed, domain in ((0, "math"), (0, "safety"), (1, "math"))
    ]
    assert len({str(batches) for batches in drawn}) == 3
    for batches in drawn:
        assert len(batches) == SETTINGS.steps
        seen = Counter(row for batch in batches[:16] for row in batch)
        assert max(seen.values()) - min(seen.values()) == 0  # 48 rows: six passes over eight pairs


def test_an_expert_without_a_record_is_trained_again(made: RealTraining) -> None:
    """Cut off between its weights and its record."""
    short = replace(made, settings=replace(SETTINGS, steps=3), domains=("math",))
    pool = short.run(silent)
    before = (pool / "math/model.safetensors").read_bytes()
    (pool / "training/math.json").unlink()
    (pool / "math/model.safetensors").write_bytes(b"")
    short.run(silent)
    assert (pool / "math/model.safetensors").read_bytes() == before
    assert (pool / "training/math.json").is_file()


def test_a_damaged_expert_is_trained_again(made: RealTraining) -> None:
    short = replace(made, settings=replace(SETTINGS, steps=3), domains=("math",))
    weights = short.run(silent) / "math/model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    short.run(silent)
    assert weights.read_bytes() == before


def test_a_training_removes_what_a_killed_one_of_its_domain_left_only(made: RealTraining) -> None:
    """Another process may be writing the steps of a domain whose name holds this one's."""
    short = replace(made, settings=replace(SETTINGS, steps=3), domains=("math",))
    records = made.out / "training"
    records.mkdir(parents=True)
    own, others = (
        {f".{d}.steps", f"..{d}.steps.1-2.partial", f".{d}.json.1-2.partial"}
        for d in ("math", "aftermath.json")
    )
    for name in own | others:
        (records / name).write_text("{}")
    short.run(silent)
    assert {file.name for file in records.iterdir()} == {"math.json", *others}


def test_training_data_that_changes_meanwhile_makes_no_expert(made: RealTraining) -> None:
    short = replace(made, settings=replace(SETTINGS, steps=3), domains=("math",))
    file = made.data / "train/math.jsonl"

    def changed(*_: object) -> None:
        file.write_text('{"prompt": "say", "response": "nothing"}\n')

    with pytest.raises(PoolError, match="changed while it was trained"):
        short.run(changed)
    assert sorted(each.name for each in made.out.iterdir()) == [
        "probe.jsonl",
        "reference",
        "training",
    ]


def test_a_link_out_of_the_reference_is_not_copied(made: RealTraining, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("of the user")
    (made.reference / "tokenizer_secret.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(PoolError, match="a link that leaves the folder"):
        made.run(silent)
    assert not (made.out / "reference").exists()


@pytest.mark.parametrize("part", ["reference", "math"])
def test_two_trainings_of_one_expert_at_once(made: RealTraining, part: str) -> None:
    short = replace(made, settings=replace(SETTINGS, steps=3), domains=("math",))
    (made.out / "training").mkdir(parents=True)
    with (
        only_writer(made.out / f".{part}.lock", "held by the first"),
        pytest.raises(OutputError, match=f"{part}: another run is writing it"),
    ):
        short.run(silent)
    assert not (made.out / "math").exists()


def test_wrong_input(made: RealTraining, tmp_path: Path) -> None:
    def refused(error: type[Exception], words: str, **change: object) -> None:
        with pytest.raises(error, match=words):
            replace(made, **change).run(silent)  # type: ignore[arg-type]

    refused(PoolError, "sigmerge pool gguf", reference=tmp_path / "nowhere")
    refused(RecipeError, "sigmerge pool data", data=tmp_path / "nowhere")
    refused(RecipeError, "no training data for poetry; there is math, safety", domains=("poetry",))
    refused(RecipeError, "more than 2 steps", settings=replace(SETTINGS, steps=2))
    refused(RecipeError, "batch of 1 or more", settings=replace(SETTINGS, batch=0))
    for rate in (float("nan"), 0.0, 1e39):
        refused(RecipeError, "rate", settings=replace(SETTINGS, rate=rate))
    for seed in (-1, 2**70):
        refused(RecipeError, f"seed: {seed} is none", settings=replace(SETTINGS, seed=seed))
    refused(OutputError, "did not make it", out=made.data)
    files: dict[str, Any] = {"probe.jsonl": {}, "items/code.jsonl": {}, "train/coding.jsonl": {}}
    (made.data / "data.json").write_text(json.dumps({"files": files}))
    named = r"data.json names are missing.*\n  - items/code.jsonl"
    refused(RecipeError, rf"{named}\n  - train/coding.jsonl$")
    refused(RecipeError, rf"{named}$", domains=("math",))
    (made.data / "data.json").unlink()
    assert not made.out.exists()
    if not torch.cuda.is_available():
        refused(RecipeError, "no GPU", device="cuda")
    (made.data / "train/math.jsonl").write_text('{"prompt": "x"}\n')
    refused(RecipeError, 'line 1: a training pair needs a "response"')
    (made.data / "train/math.jsonl").write_text('{"prompt": "' + "x" * 80 + '", "response": "y"}\n')
    refused(RecipeError, "longer than 64 tokens")
