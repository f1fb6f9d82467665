"""`make wheel`: manylinux wheels in dist/, for x86-64 and aarch64.

    python native/wheels.py [--python python3.11 --python python3.12] [--folder dist]

ziglang compiles for both processors on either, against the glibc of 2012 (manylinux2014). CPython
3.11 has a wheel of its own; that of 3.12 has the stable ABI, for all later ones. A wheel of another
processor takes Python's headers from the interpreter here: they say nothing of the processor where
both are 64 bits wide.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
GLIBC, POLICY = "2.17", "manylinux_2_17"
MOST_BYTES = 20_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="CPython 3.11, and 3.12 or later")
    parser.add_argument("--folder", type=Path, default=Path("dist"))
    parser.add_argument("--machine", action="append", choices=MACHINES)
    options = parser.parse_args()
    for python in options.python or ["python3.11", "python3.12"]:
        for machine in options.machine or MACHINES:
            made = built(python, machine, options.folder)
            size = made.stat().st_size
            print(f"{made}  {size / 1e6:.1f} MB", flush=True)
            if size > MOST_BYTES:
                sys.exit(f"{made.name} has more than {MOST_BYTES / 1e6:.0f} MB")


def built(python: str, machine: str, folder: Path) -> Path:
    """The wheel of one interpreter for one processor; auditwheel finds that it needs old glibc."""
    # What CMake and the names of modules are told of the machine that is built for.
    cross = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={machine}"
    environment = {
        **os.environ,
        "SIGMERGE_TARGET": f"{machine}-linux-gnu.{GLIBC}",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "CMAKE_ARGS": f"{cross} -DSM_SUFFIX={_suffix(python, machine)}",
    }
    with tempfile.TemporaryDirectory() as temporary:
        place = ["--wheel-dir", temporary]
        run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", *place, ".", env=environment)
        (made,) = Path(temporary).glob("*.whl")
        repaired = Path(temporary, "repaired")
        policy = ["--plat", f"{POLICY}_{machine}", "--wheel-dir", str(repaired)]
        run(sys.executable, "-m", "auditwheel", "repair", *policy, str(made))
        (wheel,) = repaired.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return wheel.replace(folder / wheel.name)


def _suffix(python: str, machine: str) -> str:
    """How the module's file ends for this interpreter there."""
    code = "import sys; print(*sys.version_info[:2])"
    asked = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    major, minor = map(int, asked.stdout.split())
    if minor >= 12:
        return ".abi3.so"
    return f".cpython-{major}{minor}-{machine}-linux-gnu.so"


def run(*command: str, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=env)


if __name__ == "__main__":
    main()
