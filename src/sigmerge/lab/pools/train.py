"""Five experts of a real reference: full fine-tuning on local pairs of prompt and response.

    OUT/reference/, OUT/DOMAIN/        checkpoints in bfloat16: a pool
    OUT/training/DOMAIN.json           settings, sums of what was read, losses, seconds
    OUT/items/, exemplars/, probe.jsonl   copied from the data, so that the pool can be scored

An expert whose record is there is not trained again, so a run that was cut off goes on with the
experts that are missing. Only the response and its end token are learnt, after the prompt in the
reference's chat template. Batches come from a CPU generator keyed by seed and domain; a GPU adds in
an order of its own, so the same command need not give the same bytes there.
"""

from __future__ import annotations

import math
import re
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from sigmerge.checkpoints.folder import open_checkpoint
from sigmerge.checkpoints.links import check_file
from sigmerge.checkpoints.publishing import sync_tree
from sigmerge.checkpoints.writer import parse_size, saved
from sigmerge.engine.machine import LIBRARIES
from sigmerge.engine.processes import process_pool
from sigmerge.errors import OutputError, PoolError, RecipeError, SigmergeWarning
from sigmerge.files.digests import file_digests, prove
from sigmerge.files.documents import read_json_object, write_json
from sigmerge.files.locks import only_writer
from sigmerge.files.safe_open import remove, sync_folder
from sigmerge.files.sources import code_digest
from sigmerge.jobs.steps import Description, TrainStep
from sigmerge.lab.pools.nano import Schedule
from sigmerge.probing.exemplars import read_exemplars
from sigmerge.probing.memory import in_memory
from sigmerge.progress import Progress

_REFERENCE, RECORDS = "reference", "training"
DATA_PARTS = ("items", "exemplars", "probe.jsonl", "data.json")
"""What a pool takes over from the data beside the checkpoints."""
_IGNORED = -100
SEEDS, LARGEST = 2**32, float(torch.finfo(torch.float32).max)
"""How many seeds there are, and the largest rate that weights in float32 can take."""
REPORT_SECONDS = 0.5
"""How often the experts that are trained side by side are looked at."""
WINDOW = 16
"""Batches among which rows are sorted by their length."""


@dataclass(frozen=True)
class FineTuning:
    """AdamW with warm-up and cosine decay; weights in float32, products in bfloat16 on a GPU."""

    steps: int = 300
    rate: float = 2e-4
    batch: int = 32
    longest: int = 384
    """Tokens of a pair at most; a longer one loses its end."""
    warmup: int = 20
    seed: int = 0

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.steps, self.rate, self.warmup)


@dataclass(frozen=True)
class RealTraining:
    """A reference folder and the output of `sigmerge pool data` in, a pool out."""

    reference: Path
    data: Path
    out: Path
    settings: FineTuning
    device: str = "cpu"
    domains: tuple[str, ...] = ()
    """The experts to train now; all of which there is data, if empty."""
    jobs: int = 1
    """Processes that train experts side by side, on one device."""
    max_shard_size: str | None = None
    """Maximum shard size of an expert; None is transformers' own."""

    def check(self) -> list[str]:
        """Find what is missing before anything is loaded; returns the domains."""
        given = self.settings
        if given.steps <= given.warmup or not 0 < given.rate <= LARGEST or given.batch < 1:
            raise RecipeError(
                f"steps: {given.steps}, rate: {given.rate:g}, batch: {given.batch} cannot be "
                f"trained with; give more than {given.warmup} steps, a rate such as 2e-4 and a "
                "batch of 1 or more."
            )
        if not 0 <= given.seed < SEEDS:
            raise RecipeError(f"seed: {given.seed} is none; give one from 0 to {SEEDS - 1}.")
        if not (self.reference / "config.json").is_file():
            raise PoolError(
                f"{self.reference}: no checkpoint folder; `sigmerge pool gguf` makes one of a "
                "GGUF file."
            )
        found = sorted(file.stem for file in (self.data / "train").glob("*.jsonl"))
        if not found:
            raise RecipeError(
                f"{self.data}: holds no train/DOMAIN.jsonl; `sigmerge pool data` makes them."
            )
        if missing := self._missing():
            raise RecipeError(
                f"{self.data}: these files that its data.json names are missing; run `sigmerge "
                "real data` again:",
                missing,
            )
        if unknown := [name for name in self.domains if name not in found]:
            raise RecipeError(
                f"{self.data}: no training data for {unknown[0]}; there is {', '.join(found)}."
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RecipeError("--device cuda: torch sees no GPU here; use --device cpu.")
        if self.out.exists() and not (self.out / RECORDS).is_dir():
            raise OutputError(f"{self.out}: exists, and `sigmerge pool train` did not make it.")
        return list(self.domains) or found

    def _missing(self) -> list[str]:
        """What `sigmerge pool data` wrote and is not there any more; nothing of other data.

        The pairs of domains that are not trained now may lie elsewhere.
        """
        record = self.data / "data.json"
        if not record.is_file():
            return []
        files = read_json_object(record, "what data were made of", RecipeError).get("files", {})
        missing = [name for name in files if not (self.data / name).is_file()]
        if not self.domains:
            return missing
        mine = {f"train/{domain}.jsonl" for domain in self.domains}
        return [name for name in missing if name in mine or not name.startswith("train/")]

    def describe(self) -> Description:
        """The training as a dry run: data, reference and settings are checked."""
        domains = self.check()
        self._check_settings()
        todo = tuple(domain for domain in domains if self._record(domain) is None)
        stored = open_checkpoint(self.reference)
        parameters = sum(tensor.size for tensor in stored.tensors.values())
        copied = 0 if (self.out / _REFERENCE).exists() else stored.nbytes
        # Weights, gradients and the two moments of Adam, in float32.
        memory = 16 * parameters * max(1, min(self.jobs, len(todo)))
        step = TrainStep(
            models=todo,
            steps=dict.fromkeys(todo, self.settings.steps),
            parameters=parameters,
            device=self.device,
            bytes_to_read=copied + len(todo) * stored.nbytes,
            bytes_to_write=copied + len(todo) * 2 * parameters,
            peak_memory_bytes=LIBRARIES + memory,
        )
        return Description((step,), self.jobs)

    def run(self, progress: Progress) -> Path:
        domains = self.check()
        (self.out / RECORDS).mkdir(parents=True, exist_ok=True)
        with self._alone(_REFERENCE):
            self._copy()
        self._check_settings()
        todo = [domain for domain in domains if self._record(domain) is None]
        if self.jobs == 1 or len(todo) < 2:
            for domain in todo:
                self._train(domain, progress)
            return self.out
        with process_pool(min(self.jobs, len(todo))) as pool:
            training = {pool.submit(self._train_beside, domain): domain for domain in todo}
            left: set[Future[None]] = set(training)
            while left:
                done, left = wait(left, REPORT_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                self._report([training[future] for future in left], progress)
                for future in done:
                    progress(training[future], self.settings.steps, self.settings.steps)
                if done:
                    progress("experts", len(todo) - len(left), len(todo))
        return self.out

    def _alone(self, part: str) -> AbstractContextManager[None]:
        """Keep another run from writing the same part; one may train other experts meanwhile."""
        lock = self.out / f".{part}.lock"
        return only_writer(lock, f"{self.out / part}: another run is writing it.")

    def _train_beside(self, domain: str) -> None:
        """Train in a process of its own, which writes down how far it is."""
        file = self._steps(domain)
        try:
            self._train(domain, lambda _, step, __: write_json(file, {"step": step}))
        finally:
            file.unlink(missing_ok=True)

    def _report(self, domains: Sequence[str], progress: Progress) -> None:
        for domain in domains:
            with suppress(OutputError):  # it has not begun, or has just ended
                step = read_json_object(self._steps(domain), "steps", OutputError)["step"]
                progress(domain, step, self.settings.steps)

    def _steps(self, domain: str) -> Path:
        return self.out / RECORDS / f".{domain}.steps"

    def _copy(self) -> None:
        """The reference and what comes with the data; each whole or not at all."""
        places = {self.out / _REFERENCE: self.reference}
        places |= {self.out / name: self.data / name for name in DATA_PARTS}
        for place, source in places.items():
            if not source.exists():
                continue
            if place.exists():
                if _content(place) != _content(source):
                    raise OutputError(
                        f"{place}: is not the same as {source}, so the pool was begun with another "
                        "reference or other data; choose a new folder."
                    )
                continue
            partial = place.with_name(f".{place.name}.partial")
            remove(partial)
            for file in _files(source):
                if source == self.reference:
                    check_file(source, file)
                target = partial / file.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            sync_tree(partial)
            partial.rename(place)
            sync_folder(self.out)

    def _check_settings(self) -> None:
        """Experts of one pool are trained alike."""
        for file in sorted((self.out / RECORDS).glob("*.json")):
            record = read_json_object(file, "a record of a training", OutputError)
            if record.get("settings") != asdict(self.settings):
                raise OutputError(
                    f"{self.out / file.stem}: trained with other settings, and experts of a pool "
                    f"are trained alike; choose a new folder, or give those of {file}."
                )

    def _made_from(
        self, domain: str, read: Callable[[list[Path]], dict[Path, str]] = file_digests
    ) -> dict[str, Any]:
        """What an expert is trained of: its pairs, and every file of the reference."""
        pairs = self.data / "train" / f"{domain}.jsonl"
        digests = read([pairs, *_files(self.reference)])
        sums = {str(f.relative_to(self.reference)): digests[f] for f in _files(self.reference)}
        return {"settings": asdict(self.settings), "sums": {**sums, pairs.name: digests[pairs]}}

    def _record(self, domain: str) -> dict[str, Any] | None:
        """The record of a finished expert; one with other settings is not replaced."""
        file = self.out / RECORDS / f"{domain}.json"
        if not file.is_file() or not (self.out / domain / "config.json").is_file():
            return None
        record = read_json_object(file, "a record of a training", OutputError)
        if any(record.get(key) != value for key, value in self._made_from(domain).items()):
            raise OutputError(f"{self.out / domain}: trained with other data; choose a new folder.")
        if record.get("weights") != self._weights(domain):
            return None
        if any(record.get(key) != value for key, value in _trained_by().items()):
            warnings.warn(
                f"{domain}: trained by other code or libraries ({record.get('versions')}); it "
                f"stays. Remove {self.out / domain} to train it anew.",
                SigmergeWarning,
                stacklevel=2,
            )
        return record

    def _weights(self, domain: str) -> list[str]:
        return sorted(file_digests((self.out / domain).glob("*.safetensors")).values())

    def _train(self, domain: str, progress: Progress) -> None:
        with self._alone(domain):
            own = re.compile(rf"\.+{re.escape(domain)}\.(json|steps)(\.[\d-]+\.partial)?")
            for file in (self.out / RECORDS).iterdir():
                if own.fullmatch(file.name):  # of a killed run
                    remove(file)
            self._train_alone(domain, progress)

    def _train_alone(self, domain: str, progress: Progress) -> None:
        began, made = time.perf_counter(), self._made_from(domain)
        transformers.utils.logging.disable_progress_bar()  # ours reports how far it is
        tokenizer: Any = AutoTokenizer.from_pretrained(self.reference, local_files_only=True)
        pairs = tokenized(tokenizer, self.data / "train" / f"{domain}.jsonl", self.settings.longest)
        with in_memory(f"{domain}: its training"):
            model: Any = AutoModelForCausalLM.from_pretrained(
                self.reference, dtype=torch.float32, local_files_only=True
            ).to(self.device)
            losses = fit(model, pairs, tokenizer.eos_token_id, self.settings, domain, progress)
        given = self.max_shard_size
        largest = {} if given is None else {"max_shard_size": parse_size(given)}
        partial = self.out / f".{domain}.partial"
        remove(partial)
        with saved(self.out / domain):
            model.to(torch.bfloat16).save_pretrained(partial, **largest)
            tokenizer.save_pretrained(partial)
            sync_tree(partial)
        if self._made_from(domain, prove) != made:
            remove(partial)
            raise PoolError(
                f"{domain}: the reference or the training data changed while it was trained. It is "
                "not kept; run the same command again when they change no more."
            )
        remove(self.out / domain)
        partial.rename(self.out / domain)
        sync_folder(self.out)
        record = {
            **made,
            "pairs": len(pairs),
            "device": self.device,
            **_trained_by(),
            "losses": losses,
            "seconds": round(time.perf_counter() - began, 1),
            "weights": self._weights(domain),
        }
        write_json(self.out / RECORDS / f"{domain}.json", record)


def _trained_by() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"versions": versions, "code": code_digest(fit)}


def _content(place: Path) -> dict[str, str]:
    """Sums of a file, or of all files below a folder, by name."""
    return {
        str(file.relative_to(place)): digest for file, digest in file_digests(_files(place)).items()
    }


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return [file for file in place.rglob("*") if file.is_symlink() or not file.is_dir()]


_Pair = tuple[list[int], int]
"""Tokens of prompt and response, and how many are the prompt's."""


def tokenized(tokenizer: Any, file: Path, longest: int) -> list[_Pair]:
    """The pairs of a file, prompts in the chat template, responses with their end token."""
    pairs = []
    for exemplar in read_exemplars(file, what="training pairs"):
        if not exemplar.response:
            raise RecipeError(f'{exemplar.place}: a training pair needs a "response".')
        turns = [{"role": "user", "content": exemplar.prompt}]
        prompt = exemplar.prompt
        if tokenizer.chat_template:
            prompt = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        first = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        last = tokenizer(exemplar.response, add_special_tokens=False)["input_ids"]
        if len(first) < longest:
            pairs.append(([*first, *last, tokenizer.eos_token_id][:longest], len(first)))
    if not pairs:
        raise RecipeError(f"{file}: every prompt is longer than {longest} tokens.")
    return pairs


def fit(
    model: Any,
    pairs: Sequence[_Pair],
    padding: int,
    settings: FineTuning,
    domain: str,
    progress: Progress,
) -> list[dict[str, float]]:
    """Train in place; the mean loss of every tenth of the way."""
    model.train()
    device = model.device
    optimizer = torch.optim.AdamW(
        model.parameters(),
        settings.rate,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        fused=device.type == "cuda",
    )
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, settings.schedule.factor)
    tenth, log, at_once = max(1, settings.steps // 10), [], settings.batch
    losses: list[torch.Tensor] = []
    for step, rows in enumerate(_draws(pairs, settings, domain), 1):
        some = [pairs[row] for row in rows]
        while True:
            optimizer.zero_grad()
            try:
                losses.append(_backward(model, some, padding, at_once))
                break
            except torch.OutOfMemoryError:
                if at_once == 1:
                    raise PoolError(
                        f"{domain}: not even one pair of {settings.longest} tokens fits the "
                        "memory of the device; use one with more."
                    ) from None
                at_once //= 2
                torch.cuda.empty_cache()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if step % tenth == 0:
            mean = float(torch.stack(losses).mean())
            _check_finite(math.isfinite(mean), domain, step, settings)
            log.append({"step": step, "loss": round(mean, 4)})
            losses.clear()
            progress(domain, step, settings.steps)
    finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
    _check_finite(finite, domain, settings.steps, settings)
    return log


def _check_finite(finite: bool, domain: str, step: int, settings: FineTuning) -> None:
    if not finite:
        raise PoolError(
            f"{domain}: the training has lost its weights by step {step}: they are no numbers. "
            f"Give a smaller --rate than {settings.rate:g}."
        )


def _backward(model: Any, pairs: Sequence[_Pair], padding: int, at_once: int) -> torch.Tensor:
    """Add the gradients of a batch, `at_once` pairs at a time; its mean loss over all tokens."""
    device, total = model.device, torch.zeros((), device=model.device)
    tokens = sum(len(ids) - begin for ids, begin in pairs)
    for start in range(0, len(pairs), at_once):
        ids, labels = _batch(pairs[start : start + at_once], padding)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # Padding stands at the ends of rows, where no token of theirs looks.
            logits = model(input_ids=ids.to(device)).logits[:, :-1]
        wanted = labels[:, 1:].to(device).flatten()
        summed = cross_entropy(
            logits.float().flatten(0, 1), wanted, ignore_index=_IGNORED, reduction="sum"
        )
        (summed / tokens).backward()
        total += summed.detach() / tokens
    return total


def _draws(pairs: Sequence[_Pair], settings: FineTuning, domain: str) -> list[list[int]]:
    """The rows of every batch: one shuffled pass over the data after another.

    Within a window of batches, rows of like length go together, so that little is padded.
    """
    number = int.from_bytes(domain.encode()[:6], "big")
    generator = torch.Generator().manual_seed(settings.seed + number)
    order: list[int] = []
    while len(order) < settings.steps * settings.batch:
        order += torch.randperm(len(pairs), generator=generator).tolist()
    batches: list[list[int]] = []
    for begin in range(0, settings.steps * settings.batch, WINDOW * settings.batch):
        window = order[begin : begin + WINDOW * settings.batch]
        window.sort(key=lambda row: len(pairs[row][0]))
        some = [window[i : i + settings.batch] for i in range(0, len(window), settings.batch)]
        batches += [some[i] for i in torch.randperm(len(some), generator=generator).tolist()]
    return batches[: settings.steps]


def _batch(pairs: Sequence[_Pair], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rows padded at their ends, and labels on the responses alone."""
    widest = max(len(ids) for ids, _ in pairs)
    ids = torch.full((len(pairs), widest), padding)
    labels = torch.full_like(ids, _IGNORED)
    for row, (tokens, begin) in enumerate(pairs):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, begin : len(tokens)] = ids[row, begin : len(tokens)]
    return ids, labels
