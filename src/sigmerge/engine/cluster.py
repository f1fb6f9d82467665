"""Ray: the blocks of a job as tasks of a cluster, on this machine or on others.

The driver plans, folds results in the order of the blocks, and is the only one that writes. A task
reads what it needs, computes one block as a local run does, and returns its values. So the bytes
are those of a local run, whichever task ended first or had to be run again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from sigmerge.core import Array
from sigmerge.engine.machine import CORES, LIBRARIES
from sigmerge.engine.overlap import Write
from sigmerge.engine.stream import Accelerator, Direct, Granule, Source, Stream, drive
from sigmerge.engine.workers import Workers
from sigmerge.errors import MissingExtra, SigmergeError
from sigmerge.operators.base import Operator, Pass, Passes, Site

RETRIES = 3
"""How often a task is repeated after its worker or node was lost."""
TASKS_A_GPU = 2
"""Tasks that share a GPU: one reads its block or returns it while the other's is computed. Each
keeps copies in 0.4 of what is free there (engine/gpu.py), so more would crowd one another out."""
PATIENCE = 5.0
"""Seconds to wait for an address to answer."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class CountingSource(Source, Protocol):
    @property
    def bytes_read(self) -> int: ...

    def read_elsewhere(self, count: int) -> None:
        """These bytes were read for this job by another process."""


OpenSource = Callable[[], AbstractContextManager[CountingSource]]
OpenDevice = Callable[[], Accelerator]


class Pieces:
    """A sink that keeps what is written, to be written by the driver."""

    def __init__(self) -> None:
        self.done: dict[str, Any] = {}
        self.written: list[tuple[str, int, Array]] = []

    def write(self, tensor: str, start: int, raw: Array) -> None:
        self.written.append((tensor, start, raw.copy()))

    def write_bytes(self, tensor: str, data: memoryview) -> None:
        raise AssertionError("what is only copied is copied by the driver")

    def finish(self, block: str, record: Any = None, tensors: Iterable[str] | None = None) -> None:
        self.done[block] = record


class Cluster:
    """A cluster that answers. `threads` is what one task may use, and declares.

    With `gpu` a task declares its part of one too.
    """

    def __init__(self, ray: Any, threads: int, *, gpu: bool = False) -> None:
        self._ray, self.threads = ray, max(1, min(threads, CORES))
        self._gpu = 1 / TASKS_A_GPU if gpu else 0
        if gpu and not any(node.get("GPU") for node in self._nodes()):
            raise SigmergeError(
                f"--device cuda: none of the cluster's {len(self._nodes())} nodes has a GPU that "
                "Ray knows of. Start Ray where there is one (`ray start` finds it, or --num-gpus "
                "declares it), or leave --device out."
            )

    @property
    def name(self) -> str:
        """For records: how many machines and cores there are."""
        nodes = self._nodes()
        cores = sum(int(node.get("CPU", 0)) for node in nodes)
        return f"ray, {len(nodes)} nodes, {cores} cores"

    def map(
        self,
        function: Callable[[_Item], _Result],
        items: Iterable[_Item],
        label: Callable[[_Item], str],
        *,
        memory: int = 0,
    ) -> Iterator[_Result]:
        """function(item) for all items as tasks called label(item); results in order.

        A task declares its cores, its part of a GPU and `memory` in bytes. A few more than the
        cluster runs at a time are under way.
        """
        memory += LIBRARIES if memory and self._gpu else 0  # torch, which finds the GPU
        slots = self._slots(memory)
        needs = {"num_cpus": self.threads, "num_gpus": self._gpu, "memory": memory}
        how = {"max_retries": RETRIES, "max_calls": 0}  # Ray would end a process that had a GPU
        task = self._ray.remote(**needs, **how)(_call_on_gpu if self._gpu else _call)
        sent, waiting = self._ray.put(function), deque[Any]()
        try:
            for item in items:
                waiting.append(task.options(name=label(item)).remote(sent, item))
                if len(waiting) > slots + 1:
                    yield self._result(waiting.popleft())
            while waiting:
                yield self._result(waiting.popleft())
        finally:
            for ref in waiting:
                self._ray.cancel(ref)

    def submit(self, label: str, function: Callable[..., _Result], *given: Any) -> Future[_Result]:
        """function(*given) as a task; its result, or its error, in a future."""
        needs = {"num_cpus": self.threads, "num_gpus": self._gpu, "name": label}
        ref = self._ray.remote(**needs, max_retries=RETRIES)(function).remote(*given)
        done: Future[_Result] = Future()
        done.set_running_or_notify_cancel()

        def pass_on(_: Any) -> None:
            try:
                done.set_result(self._result(ref))
            except BaseException as error:
                done.set_exception(error)

        ref.future().add_done_callback(pass_on)
        return done

    def _result(self, ref: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            raise SigmergeError(
                f"Ray lost a task {RETRIES + 1} times ({str(error).splitlines()[0]}). What is "
                "finished is kept; run the same command again."
            ) from None

    def _nodes(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _slots(self, memory: int) -> int:
        """Number of tasks that fit the cluster at a time; raises if none fits."""
        found = 0
        for node in self._nodes():
            fits = [node.get("CPU", 0) // self.threads]
            fits += [node.get("memory", 0) // memory] if memory else []
            fits += [node.get("GPU", 0) // self._gpu] if self._gpu else []
            found += int(min(fits))
        if not found:
            what = f"{self.threads} cores and {memory / 1e9:.1f} GB of memory"
            raise SigmergeError(
                f"No node of the cluster has {f'a GPU, {what}' if self._gpu else what}, which one "
                "block takes; use fewer --threads or larger nodes."
            )
        return found


def connect(address: str | None, threads: int, *, gpu: bool = False) -> Cluster:
    """The cluster at an address, the one that this process uses already, or one on this machine."""
    return Cluster(_connected(address, threads), threads, gpu=gpu)


def _connected(address: str | None, threads: int) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None:  # an attempt takes up to 40 seconds, and Ray would make twenty
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    try:
        import ray
    except ImportError:
        raise MissingExtra("--engine ray", ["ray"], ["cluster"]) from None
    if address is not None:
        _check_answers(address)
    if ray.is_initialized():
        return ray
    here: dict[str, Any] = {} if address else {"num_cpus": threads, "include_dashboard": False}
    handlers = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **here)
    except Exception as error:  # Ray raises what it likes, plain exceptions too
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        said = f"cannot be used ({first.rstrip('.')})."
        if address is None:
            raise SigmergeError(
                f"Ray on this machine: {said} Its logs are below RAY_TMPDIR, else in /tmp/ray, "
                "which must be writable. Without --engine ray, threads give the same bytes."
            ) from None
        raise SigmergeError(
            f"--address {address}: {said} A cluster that asks for a token is reached with "
            "RAY_AUTH_MODE=token and that token."
        ) from None
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers:  # Ray puts its own in their place
            signal.signal(number, handler)
    return ray


def _check_answers(address: str) -> None:
    """Ray itself would try for a long time."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    no_address = f"--address {address}: is no address; write HOST:PORT, or auto."
    if not host or not port.isdecimal():
        raise SigmergeError(no_address)
    try:
        connection = socket.create_connection((host, int(port)), PATIENCE)
    except UnicodeError:
        raise SigmergeError(no_address) from None
    except OSError as error:
        raise SigmergeError(
            f"--address {address}: nobody listens there ({error.strerror or error}). Start Ray "
            "with `ray start --head`, or leave --address out for a cluster on this machine."
        ) from None
    with connection:
        if not address.startswith("ray://") and not _greets(connection):
            raise SigmergeError(
                f"--address {address}: what listens there is not Ray's head. `ray start --head` "
                "names its port, which is neither that of the dashboard nor that of ray://."
            )


def _greets(connection: socket.socket) -> bool:
    """Whether the other side speaks first, as a Ray head does without TLS."""
    if "RAY_USE_TLS" in os.environ:
        return True
    try:
        return bool(connection.recv(1))
    except OSError:
        return False


def _call(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


def _call_on_gpu(function: Callable[[Any], Any], item: Any) -> Any:
    """Run a task, then release the GPU memory that torch caches, for other processes."""
    import torch

    try:
        return function(item)
    finally:
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class BlockReader:
    """What a task needs to pass over a block; all of it is serialised."""

    open_source: OpenSource
    granule: Granule
    statistics: Any
    threads: int
    open_device: OpenDevice | None = None

    def _stream(self, block: Sequence[Site], source: CountingSource, workers: Workers) -> Stream:
        device = self.open_device() if self.open_device else None
        return Stream([block], source, workers, self.granule, self.statistics, device)

    def parts(self, step: Pass, block: Sequence[Site]) -> tuple[list[Any], int]:
        """The results of a pass for all chunks of a block, in order, and the bytes read."""
        with self.open_source() as source, Workers(self.threads) as workers:
            stream = self._stream(block, source, workers)
            return list(stream.parts(step, block)), source.bytes_read

    def merged(
        self, operator: Operator, survey: Any, dtypes: Mapping[str, str], block: Sequence[Site]
    ) -> tuple[dict[str, Any], list[tuple[str, int, Array]], int]:
        """What the operator noted about a block, its merged values, and the bytes read for them."""
        pieces = Pieces()
        with self.open_source() as source, Workers(self.threads) as workers:
            stream = self._stream(block, source, workers)
            notes = [*stream.merge(operator, [block], survey, dtypes, pieces.write)]
            return notes[0], pieces.written, source.bytes_read


@dataclass(frozen=True)
class ClusterStream(Stream):
    """A stream whose blocks are tasks. `memory` is what one takes at most.

    `open_device` opens what passes over a block in place of the loops, where the task runs.
    """

    source: CountingSource
    cluster: Cluster = field(kw_only=True)
    open_source: OpenSource = field(kw_only=True)
    memory: int = field(kw_only=True)
    open_device: OpenDevice | None = field(default=None, kw_only=True)

    @property
    def _reader(self) -> BlockReader:
        how = (self.open_source, self.granule, self.statistics, self.cluster.threads)
        return BlockReader(*how, self.open_device)

    def survey(self, passes: Passes) -> Any:
        def run(step: Pass) -> Any:
            total = None
            sent = replace(step, fold=_unused)  # folding stays here, with what it refers to
            parts = partial(self._reader.parts, sent)
            label = partial(_label, "survey")
            for results, read in self.cluster.map(parts, self.blocks, label, memory=self.memory):
                for part in results:
                    total = step.fold(total, part)
                self.source.read_elsewhere(read)
            return total

        return drive(passes, run)

    def merge(
        self,
        operator: Operator,
        blocks: Sequence[Sequence[Site]],
        survey: Any,
        dtypes: Mapping[str, str],
        write: Write,
        direct: Direct | None = None,
    ) -> Iterator[dict[str, Any]]:
        merged = partial(self._reader.merged, operator, survey, dtypes)
        label = partial(_label, f"merge by {operator.name}")
        done = self.cluster.map(merged, blocks, label, memory=self.memory)
        for notes, pieces, read in done:
            for piece in pieces:
                write(*piece)
            self.source.read_elsewhere(read)
            yield notes


def _label(what: str, block: Sequence[Site]) -> str:
    """The name of a task for a person who looks at Ray's dashboard."""
    if not block:
        return f"{what}: nothing"
    first = block[0]
    return f"{what}: {first.tensor if first.block is None else f'layer {first.block}'}"


def _unused(total: Any, part: Any) -> Any:
    raise AssertionError("results are folded by the driver")
