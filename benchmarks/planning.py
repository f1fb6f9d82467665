"""What it costs to plan a merge with a repair of a pool of 8 B whose files have not changed.

Weights are holes in files: their headers are those of a Llama 3.1 of 8 B, in four shards each, and
one value of every tensor tells the members apart. Prints processor seconds and seconds of a plan:
the first of a process, and the median of those that follow.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.scale import MODELS, Model
from sigmerge.jobs.merge import MergeJob
from sigmerge.jobs.options import Options
from sigmerge.recipe import load_recipe

MEMBERS = ("reference", "math", "code", "chat")
SHARDS = 4


def shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, shared = model.hidden, model.inner, model.shared
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", (model.vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(model.layers):
        block = f"model.layers.{layer}."
        for part, rows in {"q": hidden, "k": shared, "v": shared, "o": hidden}.items():
            yield f"{block}self_attn.{part}_proj.weight", (rows, hidden)
        yield f"{block}mlp.gate_proj.weight", (inner, hidden)
        yield f"{block}mlp.up_proj.weight", (inner, hidden)
        yield f"{block}mlp.down_proj.weight", (hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{block}{norm}.weight", (hidden,)


def write(folder: Path, model: Model, value: int) -> None:
    """A checkpoint of holes; `value` are the bits of the first value of every tensor."""
    folder.mkdir()
    every, index = list(shapes(model)), {}
    for shard in range(SHARDS):
        file = folder / f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        header, at = {}, 0
        for name, shape in every[shard::SHARDS]:
            size = 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at, index[name] = at + size, file.name
        text = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + at)
            for tensor in header.values():
                stream.seek(8 + len(text) + tensor["data_offsets"][0])
                stream.write(struct.pack("<H", value))
    weights = {"metadata": {"total_size": 2 * model.coordinates}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": model.hidden, "intermediate_size": model.inner,
        "num_hidden_layers": model.layers, "num_attention_heads": model.hidden // 128,
        "num_key_value_heads": model.shared // 128, "vocab_size": model.vocabulary,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def recipe(folder: Path) -> dict[str, object]:
    domains = MEMBERS[1:]
    scores = {
        "experts": {e: dict.fromkeys(domains, 0.5) for e in domains},
        "anchor": dict.fromkeys(domains, 0.4),
    }
    (folder / "scores.json").write_text(json.dumps(scores))
    return {
        "merge_method": "ties",
        "base_model": str(folder / MEMBERS[0]),
        "parameters": {"density": 0.5, "weight": 0.5},
        "models": [{"model": str(folder / name), "name": name} for name in domains],
        "repair": {"scores": str(folder / "scores.json")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planning-") as home:
        folder = Path(home)
        for number, name in enumerate(MEMBERS):
            write(folder / name, MODELS[0], 0x3F80 + number)
        content, taken = recipe(folder), []
        for _ in range(1 + given.repeat):
            began = time.process_time(), time.perf_counter()
            MergeJob(load_recipe(content), folder / "out", Options(threads=1)).describe()
            taken.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    first, *later = taken
    print(f"the first plan: {first[0]:.2f} s of a processor, {first[1]:.2f} s")
    print(f"then:           {median(t[0] for t in later):.2f} s of a processor, "
          f"{median(t[1] for t in later):.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
