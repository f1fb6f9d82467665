"""Models that answer: prompts in, texts and exact token counts out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sigmerge.errors import MissingExtra, PoolError, ScoreError

T = TypeVar("T")


@dataclass(frozen=True)
class Usage:
    """What a batch cost: calls of the model, tokens read and written, time."""

    calls: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Usage(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class Sampling:
    """How to generate. A length counts new tokens, or, as `max_length`, the prompt's as well."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    stop: tuple[str, ...] = ()
    seed: int = 0
    templated: bool = False
    """The prompts went through chat(), which wrote the special tokens they begin with."""


class Model(Protocol):
    """A loaded checkpoint."""

    name: str

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[list[str]], Usage]:
        """Every prompt's answers, cut before the first stop string."""

    def chat(self, text: str) -> str:
        """A user's text in the tokenizer's chat template; as it is where there is none."""


def load_model(folder: Path, backend: str, dtype: str, batch_size: int | None) -> Model:
    """A checkpoint by transformers (hf) or vLLM (vllm)."""
    if backend == "vllm":
        return VllmModel(folder, dtype)
    return HfModel(folder, dtype, batch_size)


class HfModel:
    """Generation by transformers. Greedy answers are made in batches, sampled ones a prompt at a
    time, from a generator seeded by the prompt, so that no answer depends on its neighbours."""

    def __init__(self, folder: Path, dtype: str, batch_size: int | None) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils import logging
        except ImportError:
            raise MissingExtra("transformers", "eval", "Evaluating a checkpoint") from None
        self.torch, self.name = torch, str(folder)
        logging.disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise PoolError(f"{folder}: cannot be loaded for evaluation: {error}") from None
        self.model = model.to(device).eval()
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.batch_size = batch_size or (64 if device == "cuda" else 8)

    def chat(self, text: str) -> str:
        if not self.tokenizer.chat_template:
            return text
        turns = [{"role": "user", "content": text}]
        return str(
            self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        )

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[list[str]], Usage]:
        start, texts, usage, done = time.perf_counter(), [], Usage(), 0
        while done < len(prompts):
            size = 1 if sampling.temperature else self.batch_size
            some = prompts[done : done + size]
            answers, cost = self.halving(lambda some=some: self._batch(some, sampling))
            texts += answers
            usage += cost
            done += len(answers)
        return texts, usage + Usage(seconds=time.perf_counter() - start)

    def halving(self, work: Callable[..., T]) -> T:
        """Do a batch; when the memory does not hold it, halve the batch size and go on."""
        while True:
            try:
                return work()
            except self.torch.cuda.OutOfMemoryError:
                if self.batch_size == 1:
                    raise ScoreError(
                        f"{self.name}: not even one item fits the GPU's memory; use a larger GPU."
                    ) from None
                self.torch.cuda.empty_cache()
                self.batch_size //= 2

    def _batch(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[list[str]], Usage]:
        prompts = prompts[: self.batch_size]
        special = not (sampling.templated and self.tokenizer.chat_template)
        inputs = self.tokenizer(
            list(prompts), return_tensors="pt", padding=True, add_special_tokens=special
        )
        inputs = {k: inputs[k].to(self.model.device) for k in ("input_ids", "attention_mask")}
        width = inputs["input_ids"].shape[1]
        longest = sampling.max_new_tokens or max(1, (sampling.max_length or width + 64) - width)
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
        if sampling.temperature:
            how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
            seed = hashlib.sha256(f"{sampling.seed}|{prompts[0]}".encode()).digest()[:4]
            self.torch.manual_seed(int.from_bytes(seed))
        if sampling.stop:
            how |= {"stop_strings": list(sampling.stop), "tokenizer": self.tokenizer}
        with self.torch.inference_mode():
            rows = self.model.generate(
                **inputs, max_new_tokens=longest, num_return_sequences=sampling.samples,
                pad_token_id=self.tokenizer.pad_token_id, top_k=None, **how,
            )[:, width:].tolist()  # fmt: skip
        new = [self.until_end(row) for row in rows]
        texts = [
            _cut(self.tokenizer.decode(row, skip_special_tokens=True), sampling) for row in new
        ]
        n = sampling.samples
        usage = Usage(1, int(inputs["attention_mask"].sum()) * n, sum(map(len, new)))
        return [texts[i : i + n] for i in range(0, len(texts), n)], usage

    def until_end(self, row: list[int]) -> list[int]:
        """The tokens that were generated: up to the first end token, without padding after it."""
        ends = self.model.generation_config.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        first = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        return row[: first + 1]


class VllmModel:
    """Generation by vLLM, which batches by itself; sampled prompts carry their own seeds."""

    def __init__(self, folder: Path, dtype: str) -> None:
        try:
            from vllm import LLM, SamplingParams
        except ImportError:
            raise MissingExtra("vllm", "vllm", "The vllm backend") from None
        self.name, self._parameters = str(folder), SamplingParams
        self.engine = LLM(model=str(folder), dtype=dtype, seed=0)

    def chat(self, text: str) -> str:
        tokenizer = self.engine.get_tokenizer()
        if not tokenizer.chat_template:
            return text
        turns = [{"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[list[str]], Usage]:
        start, tokenizer = time.perf_counter(), self.engine.get_tokenizer()
        lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
        parameters = [
            self._parameters(
                n=sampling.samples, temperature=sampling.temperature, top_p=sampling.top_p,
                max_tokens=sampling.max_new_tokens or max(1, (sampling.max_length or 0) - length),
                stop=list(sampling.stop), seed=sampling.seed,
            )
            for length in lengths
        ]  # fmt: skip
        outputs = self.engine.generate(list(prompts), parameters, use_tqdm=False)
        texts = [[_cut(answer.text, sampling) for answer in output.outputs] for output in outputs]
        read = sum(len(output.prompt_token_ids) for output in outputs)
        written = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        return texts, Usage(1, read, written, time.perf_counter() - start)


def _cut(text: str, sampling: Sampling) -> str:
    """A text up to the first stop string."""
    ends = [text.find(stop) for stop in sampling.stop if stop in text]
    return text[: min(ends)] if ends else text
