"""How a job is done, as opposed to what it computes: no option changes a byte of weights, but for
the last bits of methods that solve for matrices on a GPU, which the job notes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict

from sigmerge.engine.machine import CORES, default_threads, device_kind
from sigmerge.errors import SigmergeError, require
from sigmerge.progress import Progress, silent

if TYPE_CHECKING:
    from sigmerge.engine.cluster import Cluster
    from sigmerge.engine.gpu import Gpu


@dataclass(frozen=True)
class Options:
    """`Keywords` has the same names, for the signatures of the verbs."""

    threads: int = field(default_factory=default_threads)
    max_shard_size: str | None = None
    """Maximum shard size; None chooses one from the model's size."""
    overwrite: bool = False
    allow_pickle: bool = False
    """Whether weights in pickle files are read (weights-only)."""
    allow_nonfinite: bool = False
    """Accept NaN and infinity in inputs."""
    trust_remote_code: bool = False
    """Whether a checkpoint's own Python code may run to load it."""
    durable: bool = True
    """Whether a result is on the disk before success is reported (fsync)."""
    strict: bool = False
    """Whether a benchmark without data, or models whose configurations compute something else, are
    an error."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where weights are merged and compared."""
    progress: Progress = silent
    engine: Literal["local", "ray"] = "local"
    """What runs the blocks of a job: threads of this process, or tasks of a Ray cluster."""
    address: str | None = None
    """Address of the Ray cluster, HOST:PORT or auto; None starts one on this machine."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise SigmergeError(f"threads: {self.threads} is too few; pass 1 or more.")
        if self.engine not in ("local", "ray"):
            raise SigmergeError(f"engine: {self.engine!r} is none; there are local and ray.")
        if self.address is not None and self.engine != "ray":
            raise SigmergeError("--address is that of a Ray cluster; pass --engine ray with it.")
        if device_kind(self.device) != "cpu" and self.engine == "local":
            _check(self.device)

    @property
    def cluster(self) -> Cluster | None:
        """The cluster that the job runs on; None if it runs here."""
        if self.engine == "local":
            return None
        from sigmerge.engine.cluster import connect

        return connect(self.address, self.threads, gpu=self.device != "cpu")

    @property
    def max_shard_bytes(self) -> int | None:
        from sigmerge.checkpoints.writer import parse_size

        return None if self.max_shard_size is None else parse_size(self.max_shard_size)

    @property
    def in_a_task(self) -> Options:
        """A copy for use inside a Ray task: local engine, no progress output."""
        threads = self.threads if self.engine == "local" else min(self.threads, CORES)
        here = {"engine": "local", "address": None, "progress": silent, "threads": threads}
        return _TaskOptions(**{**vars(self), **here})

    @property
    def engine_name(self) -> str:
        """Name of the engine, for the record."""
        cluster = self.cluster
        where = f"local, {self.threads} threads" if cluster is None else cluster.name
        return where if self.device == "cpu" else f"{where}, {self.device}"

    @property
    def workers(self) -> int:
        """Threads that make results; beside a GPU a quarter less, since more of them would wait
        for Python's lock."""
        return self.threads if self.device == "cpu" else self.threads - self.threads // 4

    def gpu(self) -> Gpu | None:
        """The GPU that passes over weights, or None."""
        return open_gpu() if (open_gpu := self.open_gpu) else None

    @property
    def open_gpu(self) -> Callable[[], Gpu] | None:
        """A function that opens the GPU, here or in a task; None on the CPU."""
        return None if self.device == "cpu" else partial(_opened, self.device)


class _TaskOptions(Options):
    """Options inside a task: the checks of the driver's machine do not apply."""

    def __post_init__(self) -> None:
        pass


def _check(device: str) -> None:
    """Raise if this machine has no GPU, or Triton is not installed."""
    from sigmerge.probing.loading import checked_device

    require(f"--device {device}", gpu=["torch"])
    checked_device(device)
    require(f"--device {device}", gpu=["triton"])


def _opened(device: str) -> Gpu:
    _check(device)
    from sigmerge.engine.gpu import Gpu

    return Gpu(device)


class Keywords(TypedDict, total=False):
    """The fields of `Options` as keyword arguments."""

    threads: int
    max_shard_size: str | None
    overwrite: bool
    allow_pickle: bool
    allow_nonfinite: bool
    trust_remote_code: bool
    durable: bool
    strict: bool
    device: Literal["cpu", "cuda"]
    progress: Progress
    engine: Literal["local", "ray"]
    address: str | None
