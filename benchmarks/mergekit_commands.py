"""mergekit's commands and ours side by side on generated models: seconds, memory, equality.

python -m benchmarks.mergekit_commands --out table.md
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

SIZES = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "vocab_size": 500,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


class Ran(NamedTuple):
    code: int
    seconds: float
    bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="File that the table is added to, too.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for row in rows(Path(scratch)):
            print(row, flush=True)
            if given.out:
                with given.out.open("a", encoding="utf-8") as stream:
                    stream.write(row + "\n")


def rows(folder: Path) -> Iterator[str]:
    """A table in Markdown: every command with both tools."""
    make_models(folder)
    yield "| command | mergekit 0.1.5 | sigmerge | the results |"
    yield "|---|--:|--:|---|"
    for name, script, words, theirs_out in commands(folder):
        ran = {}
        for tool in ("theirs", "ours"):
            place = folder / tool
            own = [word.replace("OUT", str(place / name)) for word in words]
            called = [script] if tool == "theirs" else ["sigmerge", "mergekit", name]
            ran[tool] = run([*called, *own], folder / f"{tool}-{name}.log")
        yield f"| `{script}` | {told(ran['theirs'])} | {told(ran['ours'])} | " + (
            f"{compared(folder, name, theirs_out)} |"
            if not ran["theirs"].code and not ran["ours"].code
            else "not compared |"
        )


def told(ran: Ran) -> str:
    if ran.code:
        return "fails"
    return f"{ran.seconds:.1f} s, {ran.bytes / 1e6:.0f} MB"


def run(words: list[str], log: Path) -> Ran:
    """A command in a process of its own; memory is its largest resident set."""
    begun = time.perf_counter()
    with log.open("wb") as stream:
        found = shutil.which(words[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if found is None:
            return Ran(127, 0.0, 0)
        streams = [(os.POSIX_SPAWN_DUP2, stream.fileno(), one) for one in (1, 2)]
        child = os.posix_spawn(found, words, os.environ, file_actions=streams)
        _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Ran(code, time.perf_counter() - begun, used.ru_maxrss * 1024)


def compared(folder: Path, name: str, part: str) -> str:
    """How far the tensors of both results are apart; experts are compared as they are stacked."""
    theirs, ours = (tensors(folder / tool / name / part) for tool in ("theirs", "ours"))
    if theirs.keys() != ours.keys():
        return f"differ in names: {sorted(theirs.keys() ^ ours.keys())[0]}"
    if name == "extract-lora":
        theirs, ours = products(theirs), products(ours)
    apart = {n: float(np.abs(theirs[n] - ours[n]).max(initial=0)) for n in theirs}
    largest = max(apart.values())
    if not largest:
        return f"equal ({len(apart)} tensors)"
    size = max(float(np.abs(theirs[n]).max()) for n in theirs)
    same = sum(not value for value in apart.values())
    return (
        f"{same} of {len(apart)} tensors equal, others within {largest / size:.0e} of the largest"
    )


def products(adapter: dict[str, Any]) -> dict[str, Any]:
    """Updates of an adapter in place of their factors."""
    found = {name: value for name, value in adapter.items() if ".lora_" not in name}
    for name, a in adapter.items():
        if name.endswith("lora_A.weight"):
            found[name] = adapter[name.replace("lora_A", "lora_B")] @ a
    return found


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: value.float().numpy() for name, value in load_file(file).items()}
    return stacked(found)


def stacked(found: dict[str, Any]) -> dict[str, Any]:
    """Experts of a Mixtral as mergekit stacks them."""
    named = {n.replace("block_sparse_moe", "mlp"): v for n, v in found.items()}
    places = {n.partition(".experts.0.")[0] for n in named if ".experts.0." in n}
    for place in places:
        count = sum(n.startswith(f"{place}.experts.") for n in named) // 3
        one = [
            {w: named.pop(f"{place}.experts.{i}.{w}.weight") for w in ("w1", "w2", "w3")}
            for i in range(count)
        ]
        both = np.stack([np.concatenate([e["w1"], e["w3"]]) for e in one])
        named[f"{place}.experts.gate_up_proj"] = both
        named[f"{place}.experts.down_proj"] = np.stack([e["w2"] for e in one])
    return named


def commands(folder: Path) -> Iterator[tuple[str, str, list[str], str]]:
    """Name, mergekit's program, arguments with OUT, and where the result lies below OUT."""
    base, one, other = (str(folder / name) for name in ("base", "one", "other"))
    entries = [{"model": m, "parameters": {"weight": 0.5, "density": 0.5}} for m in (one, other)]
    ties = {"merge_method": "ties", "base_model": base, "models": entries, "dtype": "float32"}
    yield "yaml", "mergekit-yaml", [written(folder, "ties", [ties]), "OUT"], ""
    half = {"merge_method": "linear", "models": entries, "name": "half", "dtype": "float32"}
    last = {"merge_method": "linear", "dtype": "float32", "models": [
        {"model": m, "parameters": {"weight": 0.5}} for m in ("half", base)]}  # fmt: skip
    several = written(folder, "several", [half, last])
    yield "multi", "mergekit-multi", [several, "--out-path", "OUT/last", "-I", "OUT/named"], "last"
    experts = [{"source_model": m, "positive_prompts": [f"w{4 + i} w{7 + i}"]}
               for i, m in enumerate((one, other))]  # fmt: skip
    moe = {"base_model": base, "gate_mode": "cheap_embed", "dtype": "float32", "experts": experts}
    yield "moe", "mergekit-moe", [written(folder, "moe", [moe]), "OUT"], ""
    raw = [{"model": f"{m}/model.safetensors", "parameters": {"weight": 0.5}} for m in (one, other)]
    files = {"merge_method": "linear", "models": raw, "dtype": "float32"}
    yield "pytorch", "mergekit-pytorch", [written(folder, "files", [files]), "OUT"], ""
    lora = ["--model", one, "--base-model", base, "--out-path", "OUT", "--max-rank", "8"]
    yield "extract-lora", "mergekit-extract-lora", lora, ""
    yield "layershuffle", "mergekit-layershuffle", ["OUT", "-m", one, "-w", "1"], ""
    legacy = ["OUT", "--merge", one, "--merge", other, "--base-model", base]
    yield "legacy", "mergekit-legacy", [*legacy, "--density", "0.5", "--weight", "0.5"], ""
    layers = [{"model": one, "start": 0, "end": 2}, {"model": other, "start": 1, "end": 4}]
    yield "bakllama", "bakllama", [written(folder, "layers", [{"layer_slices": layers}]), "OUT"], ""


def written(folder: Path, name: str, content: list[dict[str, Any]]) -> str:
    file = folder / f"{name}.yml"
    file.write_text(yaml.safe_dump_all(content))
    return str(file)


def make_models(folder: Path) -> None:
    """A base and two models that were moved away from it, with one tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<s>": 1, "</s>": 2, "<unk>": 0} | {f"w{i}": i for i in range(3, SIZES["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("base", "one", "other"):
        moved = {n: v + (0.01 * torch.randn_like(v) if name != "base" else 0)
                 for n, v in start.items()}  # fmt: skip
        model.load_state_dict(moved)
        model.save_pretrained(folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
