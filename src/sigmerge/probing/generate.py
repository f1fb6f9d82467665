"""Text generation: prompts in, texts and exact token counts out."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.checkpoints.remote import with_weights
from sigmerge.errors import MissingExtra, PoolError, ScoreError, require
from sigmerge.files.documents import read_json_object
from sigmerge.probing.loading import load_pretrained, loading, put_adapter
from sigmerge.probing.memory import free_now, in_halves

_T = TypeVar("_T")
LEAST_NOISE = 2.0**-25
"""Half the step of an exponential draw in float32, which may be 0: its logarithm must be finite."""
LONGEST = 2048
"""Tokens of an item and its answer for which a batch must have room."""


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


class LoadedModel(Protocol):
    """A loaded checkpoint."""

    name: str

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[list[str]], Usage]:
        """Every prompt's answers, cut before the first stop string."""

    def chat(self, text: str) -> str:
        """A user's text in the tokenizer's chat template; as it is where there is none."""


BACKENDS = ("hf", "vllm")


def require_backend(backend: str) -> None:
    """Raise MissingExtra where the libraries of a backend are not installed."""
    if backend == "vllm":
        require("The vllm backend", vllm=["vllm"])
    else:
        require("Evaluating a checkpoint", models=["torch", "transformers"])


ANSWERING = {
    "hf": ("torch", "transformers", "tokenizers", "peft"),
    "vllm": ("torch", "transformers", "tokenizers", "vllm"),
}
"""The libraries on which the answers of a backend depend."""


def resolved(backend: str, dtype: str) -> dict[str, str]:
    """Device and type of a backend, with `auto` resolved for this machine."""
    device = "cuda" if backend == "vllm" else model_device()
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "stored"
    return {"device": device, "dtype": dtype}


def model_device() -> str:
    """The device of transformers' models: a GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    folder: Path,
    backend: str,
    dtype: str,
    batch_size: int | None,
    share: float = 0.9,
    trust: bool = False,
) -> LoadedModel:
    """A checkpoint by transformers (hf) or vLLM (vllm), whose engine takes a share of the GPU."""
    if backend not in BACKENDS:
        raise ScoreError(f"{backend!r} is no backend; there are {', '.join(BACKENDS)}.")
    if backend == "vllm":
        return VllmModel(folder, dtype, share, trust)
    return HfModel(folder, dtype, batch_size, trust)


class HfModel:
    """Generation by transformers, in batches. Every prompt's samples are drawn by a generator of
    its own, seeded by the prompt, so that no answer depends on its neighbours.

    `dtype` auto is the type of the weights on a GPU, and float32 on processor cores: many compute
    in bfloat16 a hundred times slower.
    """

    def __init__(
        self, folder: Path, dtype: str, batch_size: int | None, trust: bool = False
    ) -> None:
        require_backend("hf")
        import torch
        from transformers import AutoTokenizer

        self.torch, self.name = torch, str(folder)
        device = model_device()
        if resolved("hf", dtype)["dtype"] == "float32":
            dtype = "float32"
        with loading(folder, "evaluation"):
            how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust}
            home = with_weights(home_of(folder))
            self.tokenizer: Any = AutoTokenizer.from_pretrained(home, **how)
            model = load_pretrained(home, trust, dtype=dtype)
            put_adapter(model, folder)
            self.model = model.to(device).eval()
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.batch_size = batch_size or self._fitting()

    def chat(self, text: str) -> str:
        return _in_template(self.tokenizer, text)

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[list[str]], Usage]:
        start, texts, usage, done = time.perf_counter(), [], Usage(), 0
        while done < len(prompts):
            rest = prompts[done:]
            answers, cost = self.halving(lambda rest=rest: self._batch(rest, sampling))
            texts += answers
            usage += cost
            done += len(answers)
        return texts, usage + Usage(seconds=time.perf_counter() - start)

    def _fitting(self) -> int:
        """The batch size to begin with: what half of the free memory holds, a power of two.

        A row of `LONGEST` tokens takes its keys and values in every layer and two float32 rows of
        the vocabulary per token. More than 64 rows on a GPU, or 16 on processor cores, gain little.
        """
        config, cuda = self.model.config.get_text_config(), self.model.device.type == "cuda"
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        cached = 2 * config.num_hidden_layers * heads * width * self.model.dtype.itemsize
        row = LONGEST * (cached + 8 * config.vocab_size)
        rows = min(free_now(self.model.device.type) // 2 // row, 64 if cuda else 16)
        return 1 << max(0, int(rows).bit_length() - 1)

    def halving(self, work: Callable[..., _T]) -> _T:
        """Do a batch; when the memory does not hold it, halve the batch size and go on."""

        def sized(rows: int) -> _T:
            self.batch_size = rows
            return work()

        return in_halves(sized, self.batch_size, self.name)

    def _batch(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[list[str]], Usage]:
        """The answers to the first prompts, as many as a batch has room for."""
        if self.tokenizer.pad_token_id is None:
            raise PoolError(
                f"{self.name}: its tokenizer has no token to pad with, and none that ends a text; "
                "name one in tokenizer_config.json (pad_token)."
            )
        n = sampling.samples
        prompts = prompts[: max(1, self.batch_size // n)]
        special = not (sampling.templated and self.tokenizer.chat_template)
        inputs = self.tokenizer(
            list(prompts), return_tensors="pt", padding=True, add_special_tokens=special
        )
        inputs = {
            k: inputs[k].repeat_interleave(n, 0).to(self.model.device)
            for k in ("input_ids", "attention_mask")
        }
        # An encoder-decoder answers with one token to begin by, others with the prompt.
        apart = self.model.config.is_encoder_decoder
        width = 1 if apart else inputs["input_ids"].shape[1]
        longest = self._longest(inputs["attention_mask"], apart, sampling)
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
        if sampling.temperature:
            how |= {"logits_processor": self._drawing(prompts, sampling), "num_beams": 1}
        if sampling.stop:
            how |= {"stop_strings": list(sampling.stop), "tokenizer": self.tokenizer}
        with self.torch.inference_mode():
            rows = self.model.generate(
                **inputs, max_new_tokens=max(longest), num_return_sequences=1,
                pad_token_id=self.tokenizer.pad_token_id, top_k=None, **how,
            )[:, width:].tolist()  # fmt: skip
        new = [self.until_end(row[:most]) for row, most in zip(rows, longest, strict=True)]
        texts = [
            _cut(self.tokenizer.decode(row, skip_special_tokens=True), sampling) for row in new
        ]
        usage = Usage(1, int(inputs["attention_mask"].sum()), sum(map(len, new)))
        return [texts[i : i + n] for i in range(0, len(texts), n)], usage

    def _longest(self, mask: Any, apart: bool, sampling: Sampling) -> list[int]:
        """The new tokens that each row may have: its prompt counts, the padding does not."""
        if sampling.max_new_tokens:
            return [sampling.max_new_tokens] * len(mask)
        widths = [1] * len(mask) if apart else mask.sum(dim=1).tolist()
        return [max(1, (sampling.max_length or width + 64) - width) for width in widths]

    def _drawing(self, prompts: Sequence[str], sampling: Sampling) -> Any:
        """Processors after which the likeliest token is a sample: with noise of Gumbel's law added
        to logarithms, the largest is drawn with their probabilities."""
        from transformers.generation import logits_process as warpers

        torch, device = self.torch, self.model.device
        seeds = [_seed(sampling, prompt) for prompt in prompts]
        generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

        def draw(_: Any, scores: Any) -> Any:
            noise = torch.empty(scores.shape, dtype=torch.float32, device=device)
            for rows, generator in zip(noise.split(sampling.samples), generators, strict=True):
                rows.exponential_(generator=generator)
            return scores - noise.clamp_(min=LEAST_NOISE).log_()

        cuts = [warpers.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        warmth = warpers.TemperatureLogitsWarper(sampling.temperature)
        return warpers.LogitsProcessorList([warmth, *cuts, draw])

    def until_end(self, row: list[int]) -> list[int]:
        """The tokens that were generated: up to the first end token, without padding after it."""
        ends = self.model.generation_config.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        first = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        return row[: first + 1]


class VllmModel:
    """Generation by vLLM, which batches by itself; every request carries its own seed."""

    def __init__(self, folder: Path, dtype: str, share: float, trust: bool = False) -> None:
        if home_of(folder) != folder:
            raise ScoreError(
                f"{folder}: the vllm backend loads folders, and no adapter beside its model; use "
                "hf, or store the model with its adapter first, by merge_method: passthrough."
            )
        # In this process: a fork could not use CUDA, and its schedule would change from run to run.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            if error.name == "vllm":
                raise MissingExtra("The vllm backend", ["vllm"], ["vllm"]) from None
            raise ScoreError(f"vllm is installed, but cannot be imported: {error}") from None
        self.name, self._parameters = str(folder), SamplingParams
        self.engine = LLM(
            model=str(folder), dtype=saved_dtype(folder) if dtype == "auto" else dtype,
            seed=0, gpu_memory_utilization=share, trust_remote_code=trust,
        )  # fmt: skip
        self.tokenizer: Any = self.engine.get_tokenizer()

    def chat(self, text: str) -> str:
        return _in_template(self.tokenizer, text)

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[list[str]], Usage]:
        start = time.perf_counter()
        special = not (sampling.templated and self.tokenizer.chat_template)
        encoded = self.tokenizer(list(prompts), add_special_tokens=special)["input_ids"]
        parameters = [
            self._parameters(
                n=sampling.samples, temperature=sampling.temperature, top_p=sampling.top_p,
                max_tokens=sampling.max_new_tokens or max(1, (sampling.max_length or 0) - len(ids)),
                stop=list(sampling.stop), seed=_seed(sampling, prompt),
            )
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]  # fmt: skip
        asked = [{"prompt_token_ids": ids} for ids in encoded]
        outputs = self.engine.generate(asked, parameters, use_tqdm=False)
        texts = [[_cut(answer.text, sampling) for answer in output.outputs] for output in outputs]
        usage = vllm_usage(outputs, sampling.samples)
        return texts, usage + Usage(seconds=time.perf_counter() - start)


def vllm_usage(outputs: Sequence[Any], samples: int = 1) -> Usage:
    """The cost of one call of the engine, from what it gave back."""
    read = sum(len(output.prompt_token_ids) for output in outputs) * samples
    written = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return Usage(1, read, written)


def saved_dtype(folder: Path) -> str:
    """The type the weights were saved in; vLLM's own `auto` would halve float32."""
    config = read_json_object(folder / "config.json", "a configuration", PoolError)
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def _in_template(tokenizer: Any, text: str) -> str:
    if not tokenizer.chat_template:
        return text
    turns = [{"role": "user", "content": text}]
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # it is a program, and may raise what it likes
        raise PoolError(
            f"{tokenizer.name_or_path}: its chat template cannot be applied "
            f"({type(error).__name__}: {error})."
        ) from None


def _seed(sampling: Sampling, prompt: str) -> int:
    """A seed of the prompt's own, so that no answer depends on its neighbours."""
    return int.from_bytes(hashlib.sha256(f"{sampling.seed}|{prompt}".encode()).digest()[:4])


def _cut(text: str, sampling: Sampling) -> str:
    """A text up to the first stop string."""
    ends = [text.find(stop) for stop in sampling.stop if stop in text]
    return text[: min(ends)] if ends else text
