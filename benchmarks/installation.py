"""What an installation costs, and whether it works as installed: `make dist`.

    python -m benchmarks.installation [dist] [--no-compiler]

Wheel and sdist of the folder go into empty environments, and into those of uvx, pipx and uv. Each
merges the first recipe of the demo and verifies the result, where neither the package nor a home
can be written. Nothing comes from a cache of pip or uv; seconds are those of this network.
`--no-compiler` builds the sdist once more, where no compiler is on PATH.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MOST_BYTES, MOST_PACKAGES, MOST_WHEEL = 150e6, 12, 20e6
SECONDS = {"wheel": 60.0, "sdist": 60.0, "uvx": 10.0}
TOOLS = Path(sys.executable).parent
FIRST_MERGE = Path(__file__).with_name("first_merge.py").resolve()


class Row(NamedTuple):
    """One way to install. Bytes on disk and packages are those that pip did not bring itself."""

    way: str
    seconds: float
    bytes: int | None = None
    packages: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dist", type=Path, nargs="?", default=Path("dist"))
    parser.add_argument("--no-compiler", action="store_true")
    options = parser.parse_args()
    sdist = newest(options.dist, "*.tar.gz")
    wheel = newest(options.dist, f"*-{tag()}-*{os.uname().machine}.whl")
    check_contents(sdist)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        work = Path(folder)
        for row in measured(work, wheel, sdist, options.no_compiler):
            rows.append(row)
            print(line(row), flush=True)
    missed = [*missed_bars(rows)]
    if wheel.stat().st_size > MOST_WHEEL:
        missed.append(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    sys.exit(f"missed: {'; '.join(missed)}" if missed else 0)


def tag() -> str:
    """Of the wheel for this interpreter."""
    return "cp311" if sys.version_info < (3, 12) else "cp312-abi3"


def newest(dist: Path, pattern: str) -> Path:
    found = sorted(dist.resolve().glob(pattern), key=lambda file: file.stat().st_mtime)
    if not found:
        sys.exit(f"{dist}: holds no {pattern}; `make dist` builds it.")
    return found[-1]


def check_contents(sdist: Path) -> None:
    """The sdist holds what git tracks, and what the build adds."""
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if more := sorted(names - {*tracked.splitlines(), "PKG-INFO"}):
        sys.exit(f"{sdist.name}: holds {', '.join(more[:5])}, which git does not track")


def measured(work: Path, wheel: Path, sdist: Path, no_compiler: bool) -> Iterator[Row]:
    yield by_pip("wheel", wheel, work)
    yield by_pip("sdist", sdist, work)
    if no_compiler:
        python = work / "no-compiler" / "bin"
        yield by_pip("no-compiler", sdist, work, {"PATH": str(python), "CXX": ""})
    shown = ["sigmerge", "--help"]
    yield timed("uvx", TOOLS / "uvx", "--from", wheel, *shown, work=work)
    yield timed("uvx, again", TOOLS / "uvx", "--from", wheel, *shown, work=work)
    yield timed("pipx run", TOOLS / "pipx", "run", "--spec", wheel, *shown, work=work)
    folder = work / "uv"
    run(TOOLS / "uv", "venv", "--python", sys.executable, folder, work=work)
    python = folder / "bin" / "python"
    shutil.rmtree(work / "home")
    yield timed("uv pip", TOOLS / "uv", "pip", "install", "--python", python, wheel, work=work)
    use(python, work)


def by_pip(way: str, package: Path, work: Path, env: Mapping[str, str] | None = None) -> Row:
    """Install into an empty environment, and merge there."""
    folder = work / way
    run(sys.executable, "-m", "venv", folder, work=work)
    python = folder / "bin" / "python"
    before = held(folder)
    command = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", package]
    seconds = timed(way, *command, work=work, env=env).seconds
    after = held(folder)
    use(python, work)
    return Row(way, seconds, after[0] - before[0], after[1] - before[1])


def held(folder: Path) -> tuple[int, int]:
    """Bytes on disk and packages of an environment."""
    files = [file.lstat() for file in folder.rglob("*")]
    return sum(each.st_blocks * 512 for each in files), len([*folder.rglob("*.dist-info")])


def use(python: Path, work: Path) -> None:
    """Merge and verify where the package cannot be written, and there is no home."""
    with write_protected(python.parents[1]), tempfile.TemporaryDirectory(dir=work) as folder:
        # Whom no permission stops gives up that privilege.
        bound = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.getuid() == 0 else []
        env = {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""}
        run(*bound, python, FIRST_MERGE, work=Path(folder), env=env)


@contextmanager
def write_protected(folder: Path) -> Iterator[None]:
    subprocess.run(["chmod", "-R", "a-w,a+rX", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)


def timed(way: str, *command: str | Path, work: Path, env: Mapping[str, str] | None = None) -> Row:
    start = time.perf_counter()
    run(*command, work=work, env=env)
    return Row(way, time.perf_counter() - start)


def run(*command: str | Path, work: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command in a folder, with a home of its own; what it printed is shown if it fails."""
    home = {"HOME": str(work / "home"), "UV_PYTHON": sys.executable}
    done = subprocess.run(
        list(map(str, command)), cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, **home, **(env or {})},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}")


def line(row: Row) -> str:
    size = "" if row.bytes is None else f"{row.bytes / 1e6:.0f} MB"
    count = "" if row.packages is None else f"{row.packages} packages"
    bar = SECONDS.get(row.way, row.seconds)
    late = f"   more than {bar:.0f} s" if row.seconds > bar else ""
    return f"{row.way:14}{row.seconds:8.1f} s{size:>10}{count:>15}{late}"


def missed_bars(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        if row.bytes is not None and row.bytes > MOST_BYTES:
            yield f"{row.way}: {row.bytes / 1e6:.0f} MB"
        if row.packages is not None and row.packages > MOST_PACKAGES:
            yield f"{row.way}: {row.packages} packages"


if __name__ == "__main__":
    main()
