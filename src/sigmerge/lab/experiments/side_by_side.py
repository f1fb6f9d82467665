"""Processes, or tasks of a cluster, that make the runs of a suite side by side.

Each writes the store by itself, so all must see its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigmerge.engine.processes import process_pool
from sigmerge.jobs.options import Options
from sigmerge.lab.experiments.costs import Shared
from sigmerge.lab.experiments.group import Maker
from sigmerge.lab.experiments.plan import PoolPlan
from sigmerge.lab.experiments.store import STORE, create

if TYPE_CHECKING:
    from sigmerge.engine.cluster import Cluster

WAIT_SECONDS = 1.0
"""Seconds between two progress reports of the waiting process."""


class Team:
    """A context manager. After an error of one process the others end with their current run."""

    def __init__(self, jobs: int, out: Path, cluster: Cluster | None = None) -> None:
        self._out, self._jobs, self._cluster = out, jobs, cluster
        if cluster is None:
            self._pool = process_pool(jobs)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *ending: Any) -> None:
        if self._cluster is None:
            self._pool.__exit__(*ending)

    def _submit(self, label: str, function: Callable[..., Any], *given: Any) -> Future[Any]:
        if self._cluster is None:
            return self._pool.submit(function, *given)
        return self._cluster.submit(label, function, *given)

    def prepare(
        self, plan: PoolPlan, numbers: Sequence[int], options: Options
    ) -> Future[Shared | None]:
        """Scores of the experts, and what these groups of the pool share."""
        return self._submit(f"suite: {plan.name}", _prepare, self._out, plan, numbers, options)

    def make(
        self, plan: PoolPlan, number: int, shared: Shared | None, options: Options
    ) -> Future[None]:
        """The runs of one group."""
        label = f"suite: {plan.name}, group {number}"
        return self._submit(label, _make, self._out, plan, number, shared, options)

    def wait(self, futures: Mapping[str, Future[Any]]) -> Iterator[str]:
        """Wait until all are done; yields the running ones at every poll."""
        left = set(futures.values())
        while left:
            at_work = [name for name, future in futures.items() if future.running()]
            yield ", ".join(at_work[: self._jobs])  # one more counts as running: it is the next
            done, left = wait(left, WAIT_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()


def _prepare(out: Path, plan: PoolPlan, numbers: Sequence[int], options: Options) -> Shared | None:
    with create(out / STORE) as store:
        maker, groups = Maker(store, plan, options), list(plan.groups())
        for _ in maker.experts():
            pass
        return maker.before(groups[number] for number in numbers)


def _make(out: Path, plan: PoolPlan, number: int, shared: Shared | None, options: Options) -> None:
    with create(out / STORE) as store:
        group = list(plan.groups())[number]
        for _ in Maker(store, plan, options, shared).group(group, out):
            pass
