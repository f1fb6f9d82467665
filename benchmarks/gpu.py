"""Merges, views and repairs on a GPU beside the processor, and beside what copying takes.

    python -m benchmarks.gpu [--layers 32] [--folder /dev/shm/gpu] [--device cuda] [--page FILE]

A generated Llama pool in bfloat16, a reference and five experts, all in the page cache. Everything
runs in one process, the second run counts: loading torch and starting CUDA take seconds, once.
*through the device* copies the bytes of all inputs to the GPU and those of a result back and into a
file. *topk* is TIES written down plainly in torch: whole tensors on the GPU, `topk` for each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import sigmerge
from benchmarks.measure import machine, versions
from benchmarks.pool import BenchPool, Shape, make_pool

METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {},
    "ties": {"density": 0.2},
    "dare_linear": {"density": 0.5},
    "dare_ties": {"density": 0.5},
}
PIECE = 64 << 20
COPIES = 1.5
"""The bar: a merge takes at most this many times the copying of its bytes."""


class Bench:
    def __init__(self, pool: BenchPool, out: Path, device: Any) -> None:
        self.pool, self.out, self.device = pool, out, device
        self.threads = len(os.sched_getaffinity(0))

    def recipe(self, method: str, **more: Any) -> dict[str, Any]:
        models = [
            {"model": str(member), "name": member.name,
             "parameters": {"weight": 0.2, **METHODS[method]}}
            for member in self.pool.members[1:]
        ]  # fmt: skip
        base = str(self.pool.reference)
        return {"merge_method": method, "base_model": base, "models": models,
                "dtype": "bfloat16", **more}  # fmt: skip

    def merge(self, method: str, device: Any) -> tuple[float, str]:
        return self._second(lambda: sigmerge.merge(self.recipe(method), self.out, device=device))

    def repair(self, device: Any) -> tuple[float, str]:
        names = self.pool.experts
        scores = self.out.with_name("scores.json")
        scores.write_text(json.dumps({
            "experts": {e: {d: 0.9 if d == e else 0.3 for d in names} for e in names},
            "anchor": {d: 0.8 - 0.1 * i for i, d in enumerate(names)},
        }))  # fmt: skip
        anchor = self.out.with_name("anchor")
        if not anchor.exists():
            sigmerge.merge(self.recipe("task_arithmetic"), anchor)
        recipe = self.recipe("task_arithmetic", repair={"scores": str(scores)})
        return self._second(lambda: sigmerge.repair(recipe, self.out, anchor=anchor, device=device))

    def views(self, device: Any) -> tuple[float, str]:
        def profile() -> Any:
            for note in self.pool.folder.rglob(".sigmerge/*"):
                if note.is_file():
                    note.unlink()
            return sigmerge.profile(self.recipe("task_arithmetic", repair={}), device=device)

        profile()
        start = time.perf_counter()
        found = profile()
        seconds = time.perf_counter() - start
        return seconds, hashlib.sha256(repr(found.views).encode()).hexdigest()

    def _second(self, make: Callable[[], Any]) -> tuple[float, str]:
        """Wall seconds of a second run, and the digest of what it wrote."""
        seconds = 0.0
        for _ in range(2):
            shutil.rmtree(self.out, ignore_errors=True)
            start = time.perf_counter()
            make()
            seconds = time.perf_counter() - start
        digest = hashlib.sha256()
        for file in sorted(self.out.glob("*.safetensors")):
            digest.update(file.read_bytes())
        return seconds, digest.hexdigest()

    def through_the_device(self) -> float:
        """Seconds for all inputs' bytes to the device, and one member's back and into a file."""
        files = [self.pool.weights(member) for member in self.pool.members]
        size = files[0].stat().st_size
        maps = [np.memmap(file, np.uint8, "r") for file in files]
        target = os.open(self.out.with_suffix(".copy"), os.O_CREAT | os.O_RDWR | os.O_TRUNC)
        cuda = self.device == "cuda"

        def piece(begin: int) -> None:
            stop = min(size, begin + PIECE)
            staged = torch.empty(stop - begin, dtype=torch.uint8, pin_memory=cuda)
            for number, values in enumerate(maps):
                np.copyto(staged.numpy(), values[begin:stop])
                copy = staged.to(self.device, non_blocking=True)
                if number == 0:
                    back = torch.empty_like(staged, pin_memory=cuda).copy_(copy)
                    os.pwrite(target, back.numpy().data, begin)
                if cuda:
                    torch.cuda.synchronize()

        best = float("inf")
        for _ in range(2):
            start = time.perf_counter()
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(piece, range(0, size, PIECE)))
            best = min(best, time.perf_counter() - start)
        os.close(target)
        self.out.with_suffix(".copy").unlink()
        return best

    def topk(self) -> float:
        """TIES written down plainly: tensors whole on the device, `topk` for each expert."""
        best = float("inf")
        for _ in range(2):
            start = time.perf_counter()
            opened = [safe_open(self.pool.weights(m), "pt") for m in self.pool.members]
            for name in opened[0].keys():  # noqa: SIM118 - it is no mapping
                values = [file.get_tensor(name).to(self.device).float() for file in opened]
                deltas = torch.stack([v - values[0] for v in values[1:]]).flatten(1)
                keep = max(1, int(0.2 * deltas.shape[1]))
                for row in deltas:
                    kept = row.abs().topk(keep).indices
                    mask = torch.zeros_like(row).index_fill_(0, kept, 1)
                    row *= mask
                sign = (0.2 * deltas).sum(0).sign()
                agree = (deltas * sign > 0) * 0.2
                merged = (deltas * agree).sum(0) / agree.sum(0).clamp(min=1e-9)
                (values[0] + merged.view_as(values[0])).to(torch.bfloat16).cpu()
            best = min(best, time.perf_counter() - start)
        return best


def ceilings(device: Any) -> Iterator[tuple[str, float]]:
    """GB/s to the device, from it, and inside it."""
    size = 1 << 30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    there, again = torch.empty_like(host, device=device), torch.empty_like(host, device=device)
    for name, target, source, moved in (
        ("host to device", there, host, size),
        ("device to host", host, there, size),
        ("device memory", again, there, 2 * size),
    ):
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        yield name, moved / best / 1e9


def page(bench: Bench, command: str) -> str:
    size = bench.pool.shape.parameters
    read = 2 * size * len(bench.pool.members)
    copying, plain = bench.through_the_device(), bench.topk()
    rows, lines = [], []
    jobs: dict[str, Callable[[Any], tuple[float, str]]] = {
        **{name: lambda device, name=name: bench.merge(name, device) for name in METHODS},
        "views": bench.views,
        "repair": bench.repair,
    }
    for name, job in jobs.items():
        on_cpu, expected = job("cpu")
        on_gpu, found = job(bench.device)
        rows.append(
            f"| {name} | {on_cpu:.2f} | {on_gpu:.2f} | {read / on_gpu / 1e9:.1f} | "
            f"{on_gpu / copying:.2f} | {'yes' if found == expected else 'NO'} |"
        )
        print(rows[-1], flush=True)
        if name in ("ties", "repair"):
            met = on_gpu <= COPIES * copying
            lines.append(f"- {'PASS' if met else 'MISS'} {name}: {on_gpu / copying:.2f} times "
                         f"copying (bar {COPIES:g})")  # fmt: skip
    gpu = torch.cuda.get_device_name() if bench.device == "cuda" else "no GPU: a rehearsal"
    speeds = ", ".join(f"{name} {speed:.0f} GB/s" for name, speed in ceilings(bench.device))
    return "\n".join([
        f"## {size / 1e9:.2f} B parameters, {read / 1e9:.1f} GB of inputs",
        "",
        f"`{command}` on {gpu}; {machine()}; {versions('torch', 'numpy')}.",
        "",
        "| | processor, s | GPU, s | GB/s read | times copying | same bytes |",
        "|---|--:|--:|--:|--:|---|",
        *rows,
        "",
        f"Through the device: {copying:.2f} s. TIES with `topk`: {plain:.2f} s without writing. "
        f"{speeds}.",
        "",
        *lines,
        "",
    ])  # fmt: skip


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gpu"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args(given)
    shape = Shape(asked.layers, asked.width, 11 * asked.width // 4, 32000)
    pool = make_pool(asked.folder / "pool", shape, 5)
    words = f"python -m benchmarks.gpu --layers {asked.layers} --width {asked.width}"
    text = page(Bench(pool, asked.folder / "out", asked.device), words)
    print(text)
    if asked.page:
        with asked.page.open("a", encoding="utf-8") as file:
            file.write(text)
    return 1 if "MISS" in text or "NO |" in text else 0


if __name__ == "__main__":
    raise SystemExit(main())
