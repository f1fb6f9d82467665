"""The pages of the site as a reader follows them: files are written, commands are run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sigmerge.nano.files import POOL
from tests.command_line import sigmerge

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]
INSTALLS = ("pip install ", "python3 -m venv env ")
"""What `make dist` runs in empty environments."""
LONG = (
    "--engine ray --threads 1",
    "sigmerge search search.yaml found/",
    "sigmerge suite mine.yaml grid/",
    "sigmerge analyze grid/",
    "sigmerge tune repair.yaml tuned/ --calls 8",  # as on the page on tuning
)
"""Ends of commands that only the campaign runs."""


class Block(NamedTuple):
    """Code of a page; `name` is the file that it is to be written as."""

    language: str
    text: str
    name: str | None


def blocks(page: Path) -> list[Block]:
    """Also those that stand in a list. The paragraph above a block may name its file."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.S | re.M):
        above = text[: match.start()].rstrip().rpartition("\n\n")[2]
        named = re.findall(r"\b[Aa]s\s+`([^`\s]+)`(?=[^`]*$)", above)
        code = textwrap.dedent(match[3])
        found.append(Block(match[2], code, named[-1] if named and above[-1] == ":" else None))
    return found


def lines(block: Block) -> Iterator[str]:
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.strip():
            yield line.strip()


def write_files(page: Path, folder: Path) -> None:
    """The files that the page names; suites answer fewer items."""
    for block in blocks(page):
        if block.name is not None:
            file = folder / block.name
            file.parent.mkdir(parents=True, exist_ok=True)
            few = block.text.replace("{suite: nano}", "{suite: nano, limit: 6}")
            file.write_text(few.replace("limit: 64 ", "limit: 8 "), encoding="utf-8")


def commands(page: Path) -> Iterator[str]:
    """Of the page's shell blocks, and of the steps of its workflow."""
    for block in blocks(page):
        yield from commands_of(block)


def commands_of(block: Block) -> Iterator[str]:
    if block.language == "sh":
        yield from lines(block)
    elif block.language == "yml" and "jobs:" in block.text:
        [job] = yaml.safe_load(block.text)["jobs"].values()
        yield from (step["run"] for step in job["steps"] if "run" in step)


def run(command: str, *, long: bool = False) -> None:
    """As it stands, but for fewer items to score. AssertionError if it fails."""
    if command.startswith(INSTALLS) or (command.endswith(LONG) and not long):
        return
    if not command.startswith("sigmerge "):
        where = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": where},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return
    words = shlex.split(command, comments=True)[1:]
    few = ["--limit", "6"] if words[0] == "evaluate" and "nano" in words else []
    ran = sigmerge(*words, *few)
    assert ran.code == 0, f"{command}: {ran.out}{ran.err}"


# What a page takes for granted


def pool(folder: Path) -> None:
    shutil.copytree(POOL, folder / "pool", ignore=shutil.ignore_patterns(".sigmerge"))


def rows(file: Path, *given: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")


def sums(folder: Path) -> None:
    for name in ("sums.jsonl", "calls.jsonl"):
        rows(folder / name, *({"question": f"{n} + 1 =", "result": str(n + 1)} for n in range(10)))


def stored_merges(folder: Path) -> None:
    """Checkpoints where a page speaks of those that a run has left."""
    for name in ("run/anchor", "run/repaired"):
        shutil.copytree(POOL / "coding", folder / name)


def made_elsewhere(folder: Path) -> None:
    shutil.copytree(POOL / "coding", folder / "made-elsewhere")


def small_ones(folder: Path) -> None:
    """Small models under the names of the page on large ones."""
    for name, expert in {"math": "math", "code": "coding", "chat": "safety"}.items():
        shutil.copytree(POOL / expert, folder / name)
    shutil.copytree(POOL / "reference", folder / "reference")


def seeing(folder: Path) -> None:
    """A text model, an expert of it, and two models with eyes whose decoder it is."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlamaForCausalLM,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    text = LlamaConfig(vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                       num_attention_heads=2)  # fmt: skip
    eyes = CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                            num_attention_heads=2, image_size=16, patch_size=8)  # fmt: skip
    both = LlavaConfig(vision_config=eyes, text_config=text, image_token_index=47)
    for seed, name in enumerate(("text-base", "text-math", "vision", "vision-charts")):
        torch.manual_seed(seed)
        made = LlamaForCausalLM(text) if "text" in name else LlavaForConditionalGeneration(both)
        made.save_pretrained(folder / name)


def grid(folder: Path) -> None:
    sums(folder)
    suite = {"name": "mine", "domains": {
        name: {f"{name}-items": {"harness": "jsonl", "files": f"{items}.jsonl",
                                 "prompt": "{question}", "answer": "result"}}
        for name, items in {"math": "sums", "coding": "calls"}.items()
    }}  # fmt: skip
    (folder / "my-suite.yaml").write_text(yaml.safe_dump(suite))
    for name in ("pool-a", "pool-b"):
        for member in ("reference", "math", "coding"):
            shutil.copytree(POOL / member, folder / name / member)
        shutil.copy(POOL / "probe.jsonl", folder / name)
        shutil.copytree(POOL / "exemplars", folder / name / "exemplars")


def exemplars(folder: Path) -> None:
    for name in ("math", "coding"):
        shutil.copy(POOL / f"exemplars/{name}.jsonl", folder)


def bucket(folder: Path) -> None:
    import fsspec

    store = fsspec.filesystem("s3")
    store.mkdir("models")
    for name in ("reference", "math", "coding"):
        for file in (POOL / name).iterdir():
            store.pipe_file(f"models/{name}/{file.name}", file.read_bytes())


GIVEN: dict[str, tuple[Any, ...]] = {
    "tutorial": (),
    "repair": (pool, sums, made_elsewhere),
    "score": (pool, sums, stored_merges),
    "large-models": (small_ones,),
    "vision": (seeing,),
    "experiments": (grid,),
    "data": (pool, exemplars),
    "cluster": (bucket,),
}
"""By page; every other has the pool."""


def follow(page: Path, folder: Path, *, long: bool = False) -> None:
    """Write the page's files and run its commands and its Python in their order."""
    for give in GIVEN.get(page.stem, (pool,)):
        give(folder)
    write_files(page, folder)
    scope: dict[str, Any] = {}
    for block in blocks(page):
        if block.language == "python" and block.name is None:
            exec(block.text, scope)
        for command in commands_of(block):
            run(command, long=long)
