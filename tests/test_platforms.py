"""What is imported, and a merge, where the modules and calls are missing that only POSIX has.

This process is still Linux: it finds what the package takes for granted, and says nothing of how
Windows itself answers. docs/platforms.md has what was run where.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sigmerge.errors import SigmergeError
from sigmerge.sandbox.run import best_mode

PREPARED = """
import importlib, os, pkgutil, signal, sys, types
import asyncio, concurrent.futures.process, multiprocessing.pool, multiprocessing.util  # of Python
import multiprocessing.popen_spawn_posix, subprocess, tempfile, shutil, selectors, http.client
import blake3, click.testing, markupsafe, numpy, pydantic, threadpoolctl, yaml

for name in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for name in ("torch", "transformers", "ray", "triton", "polars", "matplotlib", "scipy", "jinja2"):
    sys.modules[name] = None  # what only extras bring; it would take its time
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda handle, mode, count: None)
GONE = "POSIX_ SCHED_ O_NO O_CLO O_DIR O_PATH EX_ posix_ sched_ fork getuid geteuid getgid getegid"
GONE += " getpg killpg setsid setuid pread pwrite chown lchown fchown mkfifo fdatasync uname wait3"
GONE += " wait4 waitid WNOHANG register_at_fork getloadavg sendfile nice memfd"
MASKS = "pthread_ SIG_BLOCK SIG_UNBLOCK SIG_SETMASK SIGKILL SIGHUP SIGALRM SIGUSR setitimer alarm"
for module, gone in ((os, GONE), (signal, MASKS)):
    for name in dir(module):
        if name.startswith((*gone.split(),)):
            delattr(module, name)
"""
IMPORTS = """
import sigmerge
from sigmerge.errors import MissingExtra
EXTRAS = {"torch", "transformers", "ray", "triton", "polars", "matplotlib", "scipy", "jinja2"}
OWN = ("sigmerge.__main__", "sigmerge.sandbox.jail")  # the command; the program of the child
imported = 0
for found in pkgutil.walk_packages(sigmerge.__path__, "sigmerge."):
    if found.name in OWN:
        continue
    try:
        importlib.import_module(found.name)
        imported += 1
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
    except MissingExtra:
        pass
print(imported)
"""
MERGE = """
from pathlib import Path
import sigmerge
from sigmerge.nano.files import POOL, RECIPES

recipe = (RECIPES / "linear.yaml").read_text().partition("repair:")[0]
Path("recipe.yaml").write_text(recipe.replace("../pool/", f"{POOL}/"))
sigmerge.merge("recipe.yaml", "merged", threads=2)
[report] = sigmerge.verify("merged")
assert report.ok
"""


def windows_like(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PREPARED + program], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_modules_need_nothing_that_only_posix_has(tmp_path: Path) -> None:
    assert int(windows_like(IMPORTS, tmp_path)) > 150


def test_a_merge_has_the_same_bytes_without_it(tmp_path: Path) -> None:
    windows_like(MERGE, tmp_path)
    made = hashlib.sha256((tmp_path / "merged" / "model.safetensors").read_bytes()).hexdigest()
    known = json.loads(Path(__file__).with_name("same_bytes.json").read_text())
    assert made == known["rows"]["exact: linear, preset paper"]


def test_the_sandbox_says_that_it_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    best_mode.cache_clear()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SigmergeError, match="needs Linux, not win32"):
        best_mode()
