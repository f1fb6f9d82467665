"""Merges, views and repairs on a GPU beside the processor, and beside what copying takes.

    python -m benchmarks.gpu [--layers 32] [--folder /dev/shm/gpu] [--device cuda] [--page FILE]
    python -m benchmarks.gpu --only ties,repair --alone --where   # where the threads' time goes

A generated Llama pool in bfloat16, a reference and five experts, all in the page cache. Everything
runs in one process: loading torch and starting CUDA take seconds, once. The better of a second and
a third run counts, and of two copies the better.
*through the device* copies the bytes of all inputs to the GPU and those of a result back and into a
file; of a repair the anchor is an input too, which has as many bytes as another. *claiming* is five
domains claiming a block of 268 M coordinates that is on the device, all that the device does for it
beside the time in which its memory moves the bytes that the passes need. *topk* is TIES written
down plainly in torch: whole tensors on the GPU, `topk` for each. mergekit's merge is a command,
with its start-up, where it is installed.

What the bars are about comes first (`ORDER`). No measurement is begun after `--budget` seconds;
what is missing is a dash. The processor's runs show whether the bytes are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from safetensors import safe_open
from torch.autograd import DeviceType

import sigmerge
from benchmarks.measure import CommandFailed, machine, run, versions
from benchmarks.pool import BenchPool, Shape, make_pool
from sigmerge.checkpoints import writer
from sigmerge.core.dtypes import NARROW, Span
from sigmerge.engine import gpu
from sigmerge.engine.layer import LayerBlock
from sigmerge.engine.stream import StreamChunk
from sigmerge.gpu.triton_claims import ENOUGH
from sigmerge.method.occupancy import claim
from sigmerge.operators.base import Site

METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {},
    "ties": {"density": 0.2},
    "dare_linear": {"density": 0.5},
    "dare_ties": {"density": 0.5},
}
ORDER = ("ties", "repair", "claiming", "topk", "linear", "task_arithmetic", "mergekit",
         "dare_linear", "dare_ties", "views")  # fmt: skip
"""What is measured, the most wanted first."""
PIECE = 64 << 20
MODELS = {"repair": 7}
"""How many models a job reads, where these are not all of the pool and nothing else."""
COPIES = 1.1
"""The bar: a merge takes at most this many times the copying of its bytes."""
SHARE = 0.6
"""The bar: claiming takes at least this share of the device memory's speed."""
BLOCK = 1 << 28
"""Coordinates of the block that is claimed; a layer of a 70 B model has three times as many."""


class Bench:
    def __init__(self, pool: BenchPool, out: Path, device: Any, threads: int, times: Times) -> None:
        self.pool, self.out, self.device, self.times = pool, out, device, times
        self.threads, self.shard = threads, None

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
        recipe, threads = self.recipe(method), self.threads
        how: Any = {"device": device, "threads": threads, "max_shard_size": self.shard}
        return self._later(lambda: sigmerge.merge(recipe, self.out, **how))

    def repair(self, device: Any) -> tuple[float, str]:
        names = self.pool.experts
        scores = self.out.with_name("scores.json")
        scores.write_text(json.dumps({
            "experts": {e: {d: 0.9 if d == e else 0.3 for d in names} for e in names},
            "anchor": {d: 0.8 - 0.1 * i for i, d in enumerate(names)},
        }))  # fmt: skip
        anchor = self.out.with_name("anchor")
        if not anchor.exists():
            sigmerge.merge(self.recipe("task_arithmetic"), anchor, max_shard_size=self.shard)
        recipe = self.recipe("task_arithmetic", repair={"scores": str(scores)})
        how: Any = {"anchor": anchor, "device": device, "threads": self.threads}
        return self._later(lambda: sigmerge.repair(recipe, self.out, **how))

    def views(self, device: Any) -> tuple[float, str]:
        def profile() -> Any:
            shutil.rmtree(self.pool.folder / ".sigmerge", ignore_errors=True)
            recipe = self.recipe("task_arithmetic", repair={})
            return sigmerge.profile(recipe, device=device, threads=self.threads)

        profile()
        self.times.clear()
        start = time.perf_counter()
        found = profile()
        seconds = time.perf_counter() - start
        return seconds, hashlib.sha256(repr(found.views).encode()).hexdigest()

    def _later(self, make: Callable[[], Any]) -> tuple[float, str]:
        """Wall seconds of the better of a second and a third run, and the digest of the last."""
        found = []
        for _ in range(3):
            shutil.rmtree(self.out, ignore_errors=True)
            self.times.clear()
            start = time.perf_counter()
            make()
            found.append(time.perf_counter() - start)
        return min(found[1:]), digest(sorted(self.out.glob("*.safetensors")))

    def through_the_device(self, models: int) -> float:
        """Seconds for the bytes of so many models to the device, and one's back and into a file."""
        members = self.pool.members
        files = [self.pool.weights(members[i % len(members)]) for i in range(models)]
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
            os.ftruncate(target, 0)  # a merge writes new files
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

    def mergekit(self) -> float | None:
        """TIES by its command; None where it is not installed or fails."""
        if (command := shutil.which("mergekit-yaml")) is None:
            return None
        file = self.out.with_name("ties.yaml")
        recipe = self.recipe("ties")
        for model in recipe["models"]:
            del model["name"]
        file.write_text(yaml.safe_dump(recipe))
        shutil.rmtree(self.out, ignore_errors=True)
        words = [command, file, self.out, "--no-copy-tokenizer"]
        try:
            return run([*words, *(["--cuda"] if self.device == "cuda" else [])]).wall
        except CommandFailed as error:
            print(f"mergekit: {error}")
            return None


def digest(files: list[Path]) -> str:
    """Of the bytes of files, piece by piece on all cores."""

    def piece(part: tuple[Path, int]) -> bytes:
        with part[0].open("rb") as stream:
            stream.seek(part[1])
            return hashlib.sha256(stream.read(PIECE)).digest()

    parts = [(file, at) for file in files for at in range(0, file.stat().st_size, PIECE)]
    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(piece, parts))).hexdigest()


class Times:
    """Seconds of all threads by what they did, without what that called in turn."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._local, self._lock = threading.local(), threading.Lock()

    def clear(self) -> None:
        self._seconds.clear()
        self._calls.clear()

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            inner: list[float] = self._local.__dict__.setdefault("inner", [])
            inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                took = time.perf_counter() - start
                own = took - inner.pop()
                if inner:
                    inner[-1] += took
                with self._lock:
                    self._seconds[what] += own
                    self._calls[what] += 1

        return run

    @contextlib.contextmanager
    def taken(self, device: str) -> Iterator[None]:
        """While this lasts, the functions below are timed."""
        places: list[tuple[Any, str, str]] = [
            (gpu.Gpu, "send", "reading files and copying to the GPU"),
            (gpu.Gpu, "drain", "copying from the GPU and writing"),
            (gpu.Gpu, "_fitting", "the rest of a pass"),
            (gpu.Gpu, "halved", "the rest of a pass"),
            (StreamChunk, "read", "the rest of a chunk"),
            (StreamChunk, "merged", "the rest of a chunk"),
            (writer, "checksum", "checksums"),
            (writer.Output, "_write_at", "writing otherwise"),
            (writer.Output, "_read_back", "reading back (one thread waits)"),
        ]
        if device == "cuda":
            from triton.runtime.jit import JITFunction

            places += [
                (JITFunction, "run", "launching"),
                (torch.cuda.Stream, "synchronize", "waiting for the GPU"),
            ]
        with contextlib.ExitStack() as stack:
            for owner, name, what in places:
                timed = self.timed(what, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, timed))
            yield

    def __str__(self) -> str:
        return "\n".join(
            f"  {seconds:8.2f} s {self._calls[what]:7d} × {what}"
            for what, seconds in self._seconds.most_common()
        )


class _Memory:
    """A block of one tensor in memory: a reference, and experts a little away from it."""

    allow_nonfinite = False

    def __init__(self, size: int, experts: tuple[str, ...]) -> None:
        piece = min(size, 1 << 22)
        rng, self._rows = np.random.default_rng(0), {}
        base = rng.normal(0, 0.02, piece).astype(np.float32)
        for name in ("reference", *experts):
            noise = rng.normal(0, 5e-4, piece).astype(np.float32)
            raw = np.empty(piece, np.uint16)
            NARROW["BF16"](base if name == "reference" else base + noise, raw)
            self._rows[name] = np.tile(raw, -(-size // piece))[:size]
        self._rows["anchor"] = self._rows["reference"]

    def raw(self, member: str, tensor: str) -> Any:
        return Span.of(self._rows[member])

    def not_finite(self, *given: Any) -> None:
        raise ArithmeticError("a made value is not finite")


class _Counted:
    """Loops, and the bytes that their passes need: stored values, the owner map."""

    def __init__(self, loops: Any, size: int) -> None:
        self._loops, self._size, self.bytes = loops, size, 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._loops, name)

        def counted(*given: Any) -> Any:
            size = self._size
            if name in ("count_high", "count_low") and (every := given[4]) > 1:
                size = min(size // every, ENOUGH)
            each = {"count_high": 5, "count_low": 5, "mark": 6, "settle": 2, "free_map": 1}
            self.bytes += each.get(name, 0) * size
            return function(*given)

        return counted if callable(function) else function


def claiming(device: str, size: int) -> tuple[float, float, Counter[str]]:
    """GB that the passes of five claims need; their seconds; those of the device by program."""
    names = tuple(f"expert-{i}" for i in range(5))
    with ThreadPoolExecutor(8) as pool:
        room = 16 * size  # for all members, which take twelve bytes a coordinate
        loops = _Counted(gpu.Gpu(device, keep=room).claims(pool.map), size)
        source: Any = _Memory(size, names)
        site = Site("w", size, 0, 1, names, {}, 0)
        block = LayerBlock(0, [site], names, source, source, loops)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            claim(block, range(5), [size // 20] * 5, loops=loops)
            best = min(best, time.perf_counter() - start)
        loops.bytes = 0.0
        with device_work(device) as work:
            claim(block, range(5), [size // 20] * 5, loops=loops)
    return loops.bytes / 1e9, best, work


@contextlib.contextmanager
def device_work(device: str) -> Iterator[Counter[str]]:
    """Seconds of all that a GPU does: programs in Triton by their names, torch's, copies."""
    found = Counter[str]()
    if device != "cuda":
        yield found
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield found
        torch.cuda.synchronize()
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            other = "copies" if event.name.startswith("Memcpy") else "torch"
            name = event.name if event.name.startswith("_") else other
            found[name] += event.time_range.elapsed_us() / 1e6


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


class Page:
    """What was measured so far; no measurement is begun once the budget is spent."""

    def __init__(self, bench: Bench, budget: float, alone: bool, file: Path | None) -> None:
        self.bench, self._end, self._alone = bench, time.monotonic() + budget, alone
        self._file = file
        self.rows: list[str] = []
        self.lines: list[str] = []
        self.copying: dict[int, float | None] = {}

    def measured(self, job: Callable[[], Any]) -> Any:
        if time.monotonic() > self._end:
            return None
        return job()

    def job(self, name: str, job: Callable[[Any], tuple[float, str]]) -> None:
        bench, models = self.bench, MODELS.get(name, len(self.bench.pool.members))
        read = 2 * bench.pool.shape.parameters * models
        if models not in self.copying:
            self.copying[models] = self.measured(lambda: bench.through_the_device(models))
        there = self.measured(lambda: job(bench.device))
        where = str(bench.times)
        here = None if self._alone else self.measured(lambda: job("cpu"))
        if there is None:
            return
        copying = self.copying[models]
        times = there[0] / copying if copying else None
        same = "–" if here is None else "yes" if here[1] == there[1] else "NO"
        self.rows.append(
            f"| {name}, {bench.threads} threads | {number(here and here[0])} | {there[0]:.2f} | "
            f"{read / there[0] / 1e9:.1f} | {number(times)} | {same} |"
        )
        print(self.rows[-1], where, sep="\n" if where else "", flush=True)
        if name in ("ties", "repair") and times is not None:
            met = "PASS" if times <= COPIES else "MISS"
            self.say(f"- {met} {name}: {times:.2f} times copying (bar {COPIES:g})")

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def claiming(self) -> None:
        """The ceilings, and claiming beside that of the device's memory."""
        device = self.bench.device
        speeds = dict(ceilings(device))
        self.say("- Speeds: " + ", ".join(f"{n} {speed:.0f} GB/s" for n, speed in speeds.items()))
        gigabytes, seconds, by_program = claiming(device, BLOCK if device == "cuda" else BLOCK >> 8)
        most, worked = gigabytes / speeds["device memory"], sum(by_program.values())
        share = most / worked if worked else 0.0
        programs = ", ".join(f"`{name}` {took * 1e3:.2f} ms" for name, took in by_program.items())
        self.say(
            f"- {'PASS' if share >= SHARE else 'MISS'} claiming: {share:.0%} of the device "
            f"memory's speed, {most / seconds:.0%} with Python between launches (bar {SHARE:.0%}); "
            f"{gigabytes:.1f} GB, {worked * 1e3:.2f} ms of {seconds * 1e3:.1f} ms: {programs}"
        )

    def topk(self) -> None:
        self.say(f"- TIES with `topk`: {self.bench.topk():.2f} s without writing")

    def mergekit(self) -> None:
        if seconds := self.bench.mergekit():
            self.say(f"- TIES by mergekit: {seconds:.1f} s")

    def save(self) -> None:
        """What is stopped later leaves what it measured."""
        if self._file:
            self._file.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        shape = self.bench.pool.shape
        command = f"python -m benchmarks.gpu --layers {shape.layers} --width {shape.width}"
        bench, size = self.bench, self.bench.pool.shape.parameters
        name = torch.cuda.get_device_name() if bench.device == "cuda" else "no GPU: a rehearsal"
        return "\n".join([
            f"## {size / 1e9:.2f} B parameters, {2 * size * 6 / 1e9:.1f} GB of inputs",
            "",
            f"`{command}` on {name}; {machine()}; {versions('torch', 'numpy')}.",
            "",
            "| | processor, s | GPU, s | GB/s read | times copying | same bytes |",
            "|---|--:|--:|--:|--:|---|",
            *self.rows,
            "",
            "Through the device: "
            + ", ".join(f"{n} models {number(took)} s" for n, took in self.copying.items())
            + ".",
            "",
            *self.lines,
            "",
        ])  # fmt: skip


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gpu"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))), help="as 16,8,4")
    parser.add_argument("--shard", help="the most a file of a result takes")
    parser.add_argument("--alone", action="store_true", help="without the processor's runs")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--only", help="names of measurements, with commas, in their order")
    parser.add_argument("--where", action="store_true", help="where the threads' time goes")
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args(given)
    shape = Shape(asked.layers, asked.width, 11 * asked.width // 4, 32000)
    pool, times = make_pool(asked.folder / "pool", shape, 5), Times()
    threads = [int(word) for word in asked.threads.split(",")]
    bench = Bench(pool, asked.folder / "out", asked.device, threads[0], times)
    bench.shard = asked.shard
    jobs: dict[str, Callable[[Any], tuple[float, str]]] = {
        **{name: lambda device, name=name: bench.merge(name, device) for name in METHODS},
        "repair": bench.repair,
        "views": bench.views,
    }
    page = Page(bench, asked.budget, asked.alone, asked.page)
    others = {"claiming": page.claiming, "topk": page.topk, "mergekit": page.mergekit}
    for bench.threads in threads:
        for name in asked.only.split(",") if asked.only else ORDER:
            if name in jobs:
                with times.taken(asked.device) if asked.where else contextlib.nullcontext():
                    page.job(name, jobs[name])
            elif bench.threads == threads[0]:
                page.measured(others[name])
            page.save()
    text = page.text()
    print(text)
    return 1 if "MISS" in text or "NO |" in text else 0


if __name__ == "__main__":
    raise SystemExit(main())
