"""The power fails: what a disk holds at that moment, seen through a copy of its image.

The job writes into an ext4 file system in an image file. Whatever the kernel has not handed to the
disk is not in the image, so a copy of it, mounted, is what the next start of the machine finds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import job
from tests.faults.test_kills import everything, old_result

ROOT = Path(__file__).parents[2]


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop,commit=300", image, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An empty file system; skips where one cannot be mounted."""
    made = tmp_path / "disk.img"
    with made.open("wb") as stream:
        stream.truncate(32 << 20)
    if os.geteuid() != 0:
        pytest.skip("only root can mount an image")
    try:
        subprocess.run(["mkfs.ext4", "-q", made], check=True, capture_output=True)
        with mounted(made, tmp_path / "try"):
            pass
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"an image cannot be made or mounted here ({error})")
    return made


def run_job(out: Path, *options: str) -> bool:
    """Whether the job published its folder; a fault may kill it before."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.faults.job", out, *options],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    return ran.stdout == "published\n"


def after_power_cut(image: Path, name: str) -> dict[str, bytes]:
    """What the next start of the machine finds under a name."""
    copy = image.with_suffix(".copy")
    shutil.copyfile(image, copy)
    with mounted(copy, image.parent / "after") as disk:
        return everything(disk / name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    job.write(out)
    return everything(out)


def test_a_published_result_survives(image: Path, whole: dict[str, bytes]) -> None:
    with mounted(image, image.parent / "disk") as disk:
        assert run_job(disk / "out")
        assert after_power_cut(image, "out") == whole


def test_the_cut_is_a_cut(image: Path, whole: dict[str, bytes]) -> None:
    """Without fsync the result is lost; else the test before could not fail."""
    with mounted(image, image.parent / "disk") as disk:
        assert run_job(disk / "out", "--no-fsync")
        assert everything(disk / "out") == whole
        assert after_power_cut(image, "out") != whole


@pytest.mark.parametrize(
    "fault",
    [("fsync", "1"), ("fsync", "4"), ("fsync", "9"), ("exchange", "1"), ("pwrite", "9"), None],
)
def test_a_cut_while_a_result_is_replaced_leaves_one_of_the_two(
    image: Path, whole: dict[str, bytes], fault: tuple[str, str] | None
) -> None:
    with mounted(image, image.parent / "disk") as disk:
        old = old_result(disk / "out")
        os.sync()
        options = ["--call", fault[0], "--at", fault[1], "--fault", "kill after"] if fault else []
        published = run_job(disk / "out", *options)
        assert published == (fault is None)
        found = after_power_cut(image, "out")
        assert found == whole if published else found in (old, whole)


def test_a_run_that_the_cut_interrupted_is_taken_up_again(
    image: Path, whole: dict[str, bytes]
) -> None:
    """The journal may have survived where the shards did not: it is not believed then."""
    with mounted(image, image.parent / "disk") as disk:
        run_job(disk / "out", "--call", "fsync", "--at", "1")
        subprocess.run(["sync", "-f", disk / ".out.partial/sigmerge/journal.jsonl"], check=True)
        for shard in disk.glob(".out.partial/*.safetensors"):
            os.truncate(shard, 0)
        copy = image.with_suffix(".copy")
        shutil.copyfile(image, copy)
    with mounted(copy, image.parent / "after") as disk:
        assert run_job(disk / "out")
        assert everything(disk / "out") == whole
