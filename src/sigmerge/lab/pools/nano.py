"""Train a pool: a reference that knows half of the facts, and five mild experts.

The reference learns the seen half of all domains. Each expert goes on from the *stored* reference
at a small learning rate, with all facts of its own domain and some replay of the reference's
mixture. Data, initial weights and batches come from CPU generators keyed by the seed; on one
machine and thread count a CPU run gives the same bytes every time.

    sigmerge pool nano OUT --seed 0 --size nano --device cpu

The shipped settings were chosen so that the repair gains. `--rate 1e-3 --replay 0` makes harsher
experts, which move farther and forget more: pools to test a method on that was not tuned on them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sigmerge.checkpoints.publishing import put_in_place, sync_tree
from sigmerge.engine.machine import LIBRARIES
from sigmerge.errors import OutputError, RecipeError
from sigmerge.files.locks import only_writer
from sigmerge.files.safe_open import remove
from sigmerge.jobs.steps import Description, TrainStep
from sigmerge.nano import files
from sigmerge.nano.facts import NANO_DOMAINS, Domain, build_all
from sigmerge.nano.tokenizer import CONTEXT, build_tokenizer, save_tokenizer
from sigmerge.probing.loading import quiet
from sigmerge.probing.threads import one_torch_thread
from sigmerge.progress import Progress

IGNORED = -100
ATTENTION = "eager"  # the fused kernels' gradients are not deterministic on a GPU
ScoreCheckpoint = Callable[[Path, str, Path], dict[str, float]]
"""Domain scores of a checkpoint on a split of a pool; they are part of the pool's log."""


@dataclass(frozen=True)
class Schedule:
    """Steps at a peak learning rate, with warm-up and cosine decay to zero."""

    steps: int
    rate: float
    warmup: int = 50

    def factor(self, step: int) -> float:
        """The part of the peak rate that a step runs at."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup)))


@dataclass(frozen=True)
class Size:
    """A model's shape and how it is trained."""

    width: int
    layers: int
    hidden: int
    reference: Schedule
    expert: Schedule
    batch: int = 256
    head: int = 32
    replay: float = 0.3


SIZES = {
    "mini": Size(64, 2, 176, Schedule(60, 1e-2, 5), Schedule(10, 3e-3, 2), batch=32),
    "nano": Size(128, 6, 352, Schedule(1500, 1e-3), Schedule(400, 3e-4)),
    "6.7M": Size(256, 8, 688, Schedule(1500, 1e-3), Schedule(400, 3e-4)),
    "26M": Size(512, 8, 1376, Schedule(1500, 1e-3), Schedule(400, 3e-4)),
}


@dataclass(frozen=True)
class FactTable:
    """All facts as token rows, padded on the right; labels cover the answer and <eos> alone."""

    ids: torch.Tensor
    labels: torch.Tensor
    rows: dict[str, torch.Tensor]
    seen: dict[str, torch.Tensor]


def train(
    out: str | Path,
    seed: int = 0,
    size: str = "nano",
    device: str = "cpu",
    progress: Progress | None = None,
    *,
    rate: float | None = None,
    replay: float | None = None,
    measure: ScoreCheckpoint,
) -> Path:
    """Make a pool in the new folder `out`; `progress` is called with (member, step, steps).

    `rate` is the experts' peak learning rate and `replay` the part of each of their batches that
    is drawn from the reference's mixture; both are the size's own unless given.
    """
    out = Path(out).absolute()
    recipe = _checked(out, size, rate, replay)
    out.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(out.with_name(f".{out.name}.lock"), f"{out}: another run is writing it."):
        pool = out.with_name(f".{out.name}.partial")
        remove(pool)
        _make(pool, seed, size, device, recipe, progress, measure)
        sync_tree(pool)
        put_in_place(pool, out, overwrite=False, durable=True)
    return out


def describe(
    out: str | Path,
    size: str = "nano",
    device: str = "cpu",
    *,
    rate: float | None = None,
    replay: float | None = None,
) -> Description:
    """The training of a pool as a dry run; nothing is written."""
    recipe = _checked(Path(out).absolute(), size, rate, replay)
    with torch.device("meta"):
        parameters = LlamaForCausalLM(_config(recipe, build_tokenizer())).num_parameters()
    steps = dict.fromkeys(files.MEMBERS, recipe.expert.steps)
    step = TrainStep(
        models=files.MEMBERS,
        steps={**steps, files.REFERENCE: recipe.reference.steps},
        parameters=parameters,
        device=device,
        bytes_to_write=2 * parameters * len(files.MEMBERS),
        # Weights, gradients and the two moments of Adam, in float32.
        peak_memory_bytes=LIBRARIES + 16 * parameters,
        evaluation_calls=len(files.MEMBERS) * len(files.NANO_SPLITS),
    )
    return Description((step,), 1)


def _checked(out: Path, size: str, rate: float | None, replay: float | None) -> Size:
    recipe = experts_with(SIZES[size], rate, replay)
    if out.exists():
        raise OutputError(f"{out} exists already; name a new folder or remove it.")
    return recipe


def _make(
    pool: Path,
    seed: int,
    size: str,
    device: str,
    recipe: Size,
    progress: Progress | None,
    measure: ScoreCheckpoint,
) -> None:
    """Data, members, log and sums of a pool."""
    domains, tokenizer = build_all(seed), build_tokenizer()
    files.write_data(domains.values(), pool)
    table = _tabulate(domains, tokenizer, device)
    log: list[dict[str, Any]] = [_header(seed, size, device, recipe)]
    # One thread: the order of additions, and so every byte, is then that of any machine's CPU.
    with _deterministic(), quiet(), one_torch_thread():
        for member in files.MEMBERS:
            log += _train_member(pool, member, recipe, seed, table, tokenizer, progress)
    for member, split in product(files.MEMBERS, files.NANO_SPLITS):
        scores = measure(pool / member, split, pool)
        log.append({"member": member, "split": split, "scores": scores})
    files.write_lines(pool / files.LOG, log)
    files.write_sums(pool)


def experts_with(size: Size, rate: float | None = None, replay: float | None = None) -> Size:
    """The size with another learning rate or another replay of its experts."""
    if rate is not None and not 0 < rate < math.inf:
        raise RecipeError(f"rate: {rate:g} is not a learning rate; give one above 0, such as 3e-4.")
    if replay is not None and not 0 <= replay < 1:
        raise RecipeError(f"replay: {replay:g} is not a part of a batch; give 0 to below 1.")
    expert = size.expert if rate is None else replace(size.expert, rate=rate)
    return replace(size, expert=expert, replay=size.replay if replay is None else replay)


def _train_member(
    pool: Path,
    member: str,
    recipe: Size,
    seed: int,
    table: FactTable,
    tokenizer: Any,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """Train one checkpoint and store it in bf16; its losses for the log."""
    start = None if member == files.REFERENCE else pool / files.REFERENCE
    schedule = recipe.expert if start else recipe.reference
    model: Any = _start(recipe, tokenizer, seed, start).to(table.ids.device)
    draws = _draws(table, member, recipe, schedule.steps, seed)
    log = _fit(model, table, draws, schedule, member, progress)
    model.to(torch.bfloat16).save_pretrained(pool / member)
    save_tokenizer(tokenizer, pool / member)
    return log


def _header(seed: int, size: str, device: str, recipe: Size) -> dict[str, Any]:
    """What the pool was made from."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    made = {"seed": seed, "size": size, "device": device, "versions": versions}
    return {**made, "recipe": asdict(recipe)}


@contextmanager
def _deterministic() -> Iterator[None]:
    """The same sums in the same order at every run, on a GPU too."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _tabulate(domains: dict[str, Domain], tokenizer: Any, device: str) -> FactTable:
    """Encode every fact once."""
    facts = [fact for domain in domains.values() for fact in domain.facts]
    place = {fact.id: row for row, fact in enumerate(facts)}
    prompts = tokenizer([fact.prompt for fact in facts])["input_ids"]
    answers = tokenizer([fact.answer for fact in facts], add_special_tokens=False)["input_ids"]
    texts = [p + a + [tokenizer.eos_token_id] for p, a in zip(prompts, answers, strict=True)]
    ids = torch.full((len(facts), max(map(len, texts))), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids[row, : len(text)] = torch.tensor(text)
        labels[row, len(prompt) : len(text)] = ids[row, len(prompt) : len(text)]
    return FactTable(
        ids.to(device),
        labels.to(device),
        {name: torch.tensor([place[f.id] for f in d.facts]) for name, d in domains.items()},
        {name: torch.tensor([place[f.id] for f in d.seen]) for name, d in domains.items()},
    )


def _config(recipe: Size, tokenizer: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.width // recipe.head,
        num_key_value_heads=recipe.width // recipe.head,
        max_position_embeddings=CONTEXT,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation=ATTENTION,
    )


def _start(recipe: Size, tokenizer: Any, seed: int, reference: Path | None) -> LlamaForCausalLM:
    """A fresh model, or the stored reference in float32."""
    if reference:
        return AutoModelForCausalLM.from_pretrained(
            reference, dtype=torch.float32, attn_implementation=ATTENTION
        )
    config = _config(recipe, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _draws(table: FactTable, member: str, recipe: Size, steps: int, seed: int) -> torch.Tensor:
    """The fact rows of every batch [steps, batch]: the mixture, and an expert's own facts."""
    generator = torch.Generator().manual_seed(1000 * seed + files.MEMBERS.index(member))
    own = 0 if member == files.REFERENCE else round((1 - recipe.replay) * recipe.batch)

    def pick(rows: torch.Tensor, count: int) -> torch.Tensor:
        return rows[torch.randint(len(rows), (steps, count), generator=generator)]

    mixture = torch.stack([pick(table.seen[name], recipe.batch - own) for name in NANO_DOMAINS])
    which = torch.randint(len(NANO_DOMAINS), (1, steps, recipe.batch - own), generator=generator)
    replay = mixture.gather(0, which)[0]
    return torch.cat([pick(table.rows[member], own), replay], 1) if own else replay


def _fit(
    model: Any,
    table: FactTable,
    draws: torch.Tensor,
    schedule: Schedule,
    member: str,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """AdamW over the drawn batches; the loss at every tenth of the way, for the log."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), schedule.rate, betas=(0.9, 0.98))
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
    draws, log = draws.to(table.ids.device), []
    for step, rows in enumerate(draws, 1):
        logits = model(table.ids[rows]).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), table.labels[rows][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if step % max(1, schedule.steps // 10) == 0:
            log.append({"member": member, "step": step, "loss": round(loss.item(), 6)})
            if progress:
                progress(member, step, schedule.steps)
    return log
