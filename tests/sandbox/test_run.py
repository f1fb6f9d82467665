"""The sandbox: programs that try to break out of each of the kernel's jails."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sigmerge.errors import SigmergeError
from sigmerge.sandbox import jail
from sigmerge.sandbox import run as sandbox
from sigmerge.sandbox.run import MODES, Limits, best_mode, execute, lacks, require_permission

SHORT = Limits(seconds=3, cpu=2, memory=1 << 30, processes=8, disk=1 << 20, output=1 << 16)

NAMESPACES, LANDLOCK = MODES
SITE = sysconfig.get_paths()["purelib"]
START = """
import _posixsubprocess as starter, os, time
r, w = os.pipe()
def sh(line):
    starter.fork_exec([b"/bin/sh", b"-c", line.encode()], [b"/bin/sh"], True, (w,), None, None,
        -1, -1, -1, -1, -1, -1, r, w, False, False, -1, None, None, None, -1, None, False)
    time.sleep(0.5)
"""
"""Starts a program without an audit event; the arguments are those of Python 3.11 and 3.12."""


@pytest.fixture(params=[mode for mode in MODES if lacks(mode) is None])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def refused(program: str, mode: str, limits: Limits = SHORT) -> str:
    """Run what must fail; what the program said."""
    outcome = execute(f"{program}\nprint('BROKE OUT')", limits, mode=mode)
    assert "BROKE OUT" not in outcome.stdout
    assert outcome.status != "ok"
    return outcome.stderr


def test_a_program_runs_in_an_empty_folder(mode: str):
    program = "import os, sys; print(os.listdir('.'), sys.argv[1:], 6 * 7, sys.stdin.read())"
    outcome = execute(program, SHORT, given=b"word", mode=mode)
    assert (outcome.status, outcome.stdout, outcome.mode) == ("ok", "[] [] 42 word\n", mode)


def test_the_folder_holds_little_or_nothing(mode: str):
    """Many small files count like a large one; where nothing counts them, there are none."""
    program = "for i in range(20): open(str(i), 'ab').write(bytes(1 << 17)); print(i, flush=True)"
    outcome = execute(program, SHORT, mode=mode)
    assert outcome.status == "failed"
    written = len(outcome.stdout.split())
    assert written == 0 if mode == LANDLOCK else 0 < written <= SHORT.disk >> 17


def test_threads_work(mode: str):
    program = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(3) as pool: print(sum(pool.map(abs, range(-9, 0))))
"""
    assert execute(program, SHORT, mode=mode).stdout == "45\n"


def test_coroutines_work(mode: str):
    """Their loop talks to itself through a pair of sockets, which leads nowhere else."""
    program = """
import asyncio
async def double(n):
    await asyncio.sleep(0)
    return 2 * n
async def main():
    return await asyncio.gather(*map(double, range(4)))
print(asyncio.run(main()))
"""
    assert execute(program, SHORT, mode=mode).stdout == "[0, 2, 4, 6]\n"


def test_signals_to_oneself_work(mode: str):
    program = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("got", flush=True))
os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
"""
    assert execute(program, SHORT, mode=mode).stdout == "got\ngot\n"


def test_code_runs_only_with_permission(mode: str):
    with pytest.raises(SigmergeError, match="--allow-code-execution"):
        require_permission(False)
    require_permission(True)


def test_the_environment_is_not_there(mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    assert "hunter2" not in execute("import os; print(dict(os.environ))", SHORT, mode=mode).stdout
    steal = f"print(open('/proc/{os.getpid()}/environ', 'rb').read())"
    assert "hunter2" not in execute(steal, SHORT, mode=mode).stdout
    refused(steal, mode)


def test_no_network(mode: str):
    """Somebody listens, so that nothing but the sandbox can be what refuses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        place = listener.getsockname()
        refused(f"import socket; socket.create_connection({place}, 1)", mode)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_endless_loop(mode: str):
    start = time.perf_counter()
    outcome = execute("while True: pass", SHORT, mode=mode)
    assert outcome.status in ("timeout", "failed")
    sleep = execute("import time; time.sleep(60)", Limits(seconds=1), mode=mode)
    assert sleep.status == "timeout"
    assert time.perf_counter() - start < 10


def test_huge_allocation(mode: str):
    assert "MemoryError" in refused("x = bytearray(8 << 30)", mode)


def test_endless_output(mode: str):
    outcome = execute("while True: print('x' * 1000)", SHORT, mode=mode)
    assert outcome.status == "output"
    assert len(outcome.stdout) <= SHORT.output


def test_large_file(mode: str):
    refused("f = open('big', 'wb')\nwhile True: f.write(b'x' * 65536); f.flush()", mode)
    sparse = refused("open('big', 'wb').truncate(1 << 30)", mode)
    assert ("File too large" if mode == NAMESPACES else "not permitted") in sparse


def test_no_other_process(mode: str):
    """Memory is limited by process, so there is one."""
    for call in (
        "fork()",
        "posix_spawn('/bin/true', ['true'], {})",
        "execv('/bin/true', ['true'])",
    ):
        assert "Operation not permitted" in refused(f"import os; os.{call}", mode)
    assert "Operation not permitted" in refused(f"{START}sh('sleep 97')", mode)


def test_nothing_is_left(mode: str, monkeypatch: pytest.MonkeyPatch):
    """Also of a program that is killed, and that tried to leave its session first."""
    ended = []

    def end(child: Any, plain: Any = sandbox._end) -> None:
        ended.append(child.pid)
        assert child.returncode is not None or _session(child.pid)
        plain(child)

    monkeypatch.setattr(sandbox, "_end", end)
    assert "Operation not permitted" in refused("import os; os.setsid()", mode)
    sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    assert execute(sleep, Limits(seconds=1), mode=mode).status == "timeout"
    deadline = time.perf_counter() + 5  # the kernel takes a moment
    while any(map(_session, ended)) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert len(ended) == 2
    assert not any(map(_session, ended))


@pytest.mark.skipif(lacks(NAMESPACES) is not None, reason="no namespaces here")
def test_a_program_ends_with_the_process_that_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    """The outer process of a jail is killed alone; the program would run until its time is up."""

    def kill(leader: int) -> None:
        while len(_session(leader)) < 2:
            time.sleep(0.05)
        time.sleep(0.5)  # the program runs
        os.kill(leader, signal.SIGKILL)

    def attend(child: Any, *rest: Any, plain: Any = sandbox._attend) -> Any:
        threading.Thread(target=kill, args=(child.pid,)).start()
        return plain(child, *rest)

    monkeypatch.setattr(sandbox, "_attend", attend)
    outcome = execute("import time; time.sleep(60)", Limits(seconds=30), mode=NAMESPACES)
    assert (outcome.status, outcome.code) == ("failed", -signal.SIGKILL)


def test_nothing_runs_if_the_parent_ended_while_the_jail_started(
    mode: str, monkeypatch: pytest.MonkeyPatch
):
    """The kernel signals the end of a parent only to a child that has asked for it before."""
    monkeypatch.setattr(os, "getpid", lambda: 1)  # not the one that the jail has
    outcome = execute("print('BROKE OUT')", SHORT, mode=mode)
    assert (outcome.code, outcome.stdout) == (jail.ORPHAN, "")


@pytest.mark.parametrize("held", [True, False])
def test_the_inner_process_of_a_jail_knows_that_the_outer_one_ended(held: bool):
    program = f"""
import os, sys
sys.path.insert(0, {str(sandbox.JAIL.parent)!r})
import jail
pipe, holder = os.pipe()
{"" if held else "os.close(holder)"}
jail._die_with_holder(pipe)
"""
    ran = subprocess.run([sys.executable, "-I", "-c", program], check=False)
    assert ran.returncode == (0 if held else jail.ORPHAN)


def _session(leader: int) -> list[str]:
    """The processes of a session; those that only wait to be collected count for its leader."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session = path.read_text().rsplit(")", 1)[1].split()[:4]
            if int(session) == leader and (state != "Z" or path.parent.name == session):
                found.append(path.parent.name)
    return found


def test_killing_the_parent(mode: str):
    parent = os.getpid()
    refused(f"import os, signal; os.kill({parent}, signal.SIGTERM)", mode)
    grandparent = (
        "import os, signal\nassert os.getppid() > 1\nos.kill(os.getppid(), signal.SIGKILL)"
    )
    refused(grandparent, mode)


def test_writing_outside(mode: str, tmp_path: Path):
    target = tmp_path / "precious"
    target.write_text("here")
    for way in ("w", "a", "r+"):  # the filter alone would not see the latter two
        refused(f"open({str(target)!r}, {way!r}).write('gone')", mode)
    refused(f"import os; os.remove({str(target)!r})", mode)
    refused("open('/usr/evil', 'a').write('x')", mode)
    said = refused("open('/evil', 'a').write('x')", mode)
    assert ("Read-only file system" if mode == NAMESPACES else "Permission denied") in said
    assert target.read_text() == "here"


def test_other_programs(mode: str, tmp_path: Path):
    target = tmp_path / "made"
    execute(f"import os; os.system('touch {target}')", SHORT, mode=mode)
    execute(f"import subprocess; subprocess.run(['touch', {str(target)!r}])", SHORT, mode=mode)
    assert not target.exists()


def test_started_programs(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without an audit event: files, the parent's environment and signals, the network."""
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    target = tmp_path / "made"
    for line in (f"touch {target}", f"cat /proc/{os.getpid()}/environ", f"kill -0 {os.getpid()}"):
        refused(f"{START}sh({line!r})", mode)
    assert not target.exists()


def test_no_datagrams_and_no_local_sockets(mode: str):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        send = f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'leak', ('127.0.0.1', {port}))"
        refused(f"import socket; {send}", mode)
        with pytest.raises(TimeoutError):
            listener.recv(10)
    refused("import socket; socket.socket(socket.AF_UNIX).bind('\\0sigmerge')", mode)


def test_changes_outside_that_are_no_writes(mode: str, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    before = victim.stat()
    path, made = repr(str(victim)), repr(str(tmp_path / "made"))
    for call in (
        f"os.rename(os.__file__, {path})",
        f"os.mknod({made})",
        f"os.mkfifo({made})",
        f"os.symlink('/etc', {made})",
        f"os.link({path}, {made})",
        f"os.setxattr({path}, 'user.x', b'1')",
        f"os.chmod({path}, 0)",
        f"os.utime({path}, (0, 0))",
        f"os.truncate({path}, 0)",
        f"os.open('made', os.O_CREAT | os.O_WRONLY, dir_fd=os.open({str(tmp_path)!r}, os.O_PATH))",
    ):
        refused(f"import os; {call}", mode)
    assert [p.name for p in tmp_path.iterdir()] == ["victim"]
    after = victim.stat()
    assert (after.st_mode, after.st_mtime, after.st_size) == (before.st_mode, before.st_mtime, 8)


def test_landlock_truncates_nothing_that_it_reads():
    """Landlock itself knows of this only from Linux 6.2 on: the filter answers first."""
    if lacks(LANDLOCK) is not None:
        pytest.skip("no Landlock here")
    program = "import os; os.open('/dev/null', os.O_RDONLY | os.O_TRUNC)"
    assert "Operation not permitted" in refused(program, LANDLOCK)


NUMBERS = {"bpf": 321, "io_uring_setup": 425, "userfaultfd": 323, "keyctl": 250, "pidfd_open": 434,
           "mq_unlink": 240 + 1, "mq_open": 240, "socket": 41, "setsid": 112}  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [
        "shmget(0, 1 << 20, 0o1600)",
        "memfd_create(b'x', 0)",
        "syscall({bpf}, 0, 0, 0)",
        "syscall({io_uring_setup}, 1, 0)",
        "syscall({userfaultfd}, 0)",
        "syscall({keyctl}, 0, 0, 0)",
        "syscall({mq_open}, b'queue', 0o100, 0o600, 0)",
        "syscall({mq_unlink}, b'queue')",
        "syscall({socket}, 1, 1, 0)",
        "syscall({setsid})",
        "unshare(0x10000000)",
        "ptrace(0, 0, 0, 0)",
        "syscall({pidfd_open}, 1, 0)",
        "prctl(1, 0, 0, 0, 0)",
        "fcntl(0, 8, PARENT)",
        "ioctl(0, 0x8901, ctypes.byref(ctypes.c_int(PARENT)))",
        "ioctl(0, 0x8902, ctypes.byref(ctypes.c_int(PARENT)))",
        "socketpair(16, 3, 0, 0)",
        "prlimit(PARENT, 0, 0, 0)",
        "tgkill(PARENT, PARENT, 0)",
        "kill(0, 0)",
        "kill(-1, 0)",
        "symlink(b'/etc', b'made')",
        "splice(0, 0, 1, 0, 1, 0)",
        "acct(0)",
    ],
)
def test_calls_beyond_python(mode: str, call: str):
    """They are refused by the filter (EPERM), not for want of rights or right arguments."""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of x86-64")
    call = call.format(**NUMBERS).replace("PARENT", str(os.getpid()))
    program = "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
    outcome = execute(f"{program}print(l.{call}, ctypes.get_errno())", SHORT, mode=mode)
    assert outcome.stdout == "-1 1\n"


def test_a_sockets_owner_gets_no_signal(mode: str):
    """A pair of sockets with O_ASYNC would signal the owner that FIOSETOWN names."""
    owner = os.getppid() if mode == LANDLOCK else 1
    refused(
        "import fcntl, os, socket, struct\n"
        "a, b = socket.socketpair()\n"
        f"fcntl.ioctl(a, 0x8901, struct.pack('i', {owner}))",
        mode,
    )


def test_threads_are_few(mode: str):
    """A small stack each, so that it is not the memory that ends them."""
    program = """
import threading, time
threading.stack_size(128 << 10)
made = 0
try:
    for _ in range(1500):
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
        made += 1
except RuntimeError:
    pass
print(made, flush=True)
import os
os._exit(0)
"""
    outcome = execute(program, SHORT, mode=mode)
    assert outcome.status == "threads" or 0 < int(outcome.stdout) <= SHORT.processes


def test_what_stays_root_has_no_rights_of_root_but_to_files(tmp_path: Path):
    """Others would lift its limits, or take pages of the machine's memory out of use."""
    if os.getuid() != 0 or lacks(LANDLOCK) is not None:
        pytest.skip("needs root and Landlock")
    program, closed = tmp_path / "program", tmp_path / "closed"
    program.write_text("#!/bin/sh\nexec grep CapEff /proc/self/status\n")
    program.chmod(0o700)
    closed.mkdir(mode=0o700)
    settings = {"mode": LANDLOCK, "parent": os.getpid(), "python": str(program), "preload": [],
                "path": [str(closed)], "visible": [*sandbox.SYSTEM, "/proc", str(tmp_path)],
                "cpu": 5, "memory": 1 << 30, "processes": 64, "disk": 1 << 20}  # fmt: skip
    command = [sys.executable, "-I", "-S", str(sandbox.JAIL), json.dumps(settings)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=closed)
    assert int(ran.stdout.split()[1], 16) & ~0b110 == 0, ran


def test_everyday_modules_work(mode: str):
    """What solutions of ordinary problems use, under a filter that allows what it lists."""
    program = """
import bisect, collections, datetime, decimal, functools, glob, hashlib, heapq, io, itertools
import json, math, os, pickle, queue, random, re, select, shutil, signal, statistics, string
import sys, tempfile, threading, time, timeit, uuid, zlib
random.seed(1); random.random(); uuid.uuid4(); time.sleep(0.01); os.urandom(4); os.getcwd()
signal.setitimer(signal.ITIMER_REAL, 5); signal.alarm(0)
select.select([], [], [], 0.01); os.listdir('.'); os.stat('.'); sys.stdout.isatty()
r, w = os.pipe(); os.write(w, b'x'); os.read(r, 1); os.get_terminal_size
decimal.Decimal(1) / 3; datetime.datetime.now(); hashlib.sha256(b'x').hexdigest()
import numpy
print(int(numpy.linalg.det(numpy.eye(3)) + numpy.arange(4).sum()))
"""
    outcome = execute(program, Limits(seconds=30), path=[SITE], mode=mode)
    assert (outcome.stdout, outcome.stderr) == ("7\n", "")


def test_calls_that_the_filter_does_not_know_are_absent(mode: str):
    """clone3, a call newer than the table, and the x32 numbering."""
    for number in (435, 9999, 0x40000000 + 59):
        program = "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
        program += f"print(l.syscall(ctypes.c_long({number}), 0, 0), ctypes.get_errno())"
        assert execute(program, SHORT, mode=mode).stdout == "-1 38\n"


CALL_32 = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret
at = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(at)(), flush=True)
"""
"""Calls getpid of 32-bit x86, whose numbers the filter does not know."""


def test_a_call_of_another_architecture_ends_the_program(mode: str):
    if os.uname().machine != "x86_64":
        pytest.skip("x86-64 alone has a second set of calls")
    if subprocess.run([sys.executable, "-c", CALL_32], capture_output=True).returncode:
        pytest.skip("this kernel has no 32-bit calls")
    outcome = execute(CALL_32, SHORT, mode=mode)
    killed = -signal.SIGSYS & 0xFF if mode == NAMESPACES else -signal.SIGSYS
    assert (outcome.code, outcome.stdout) == (killed, "")


def test_the_tables_are_the_kernels():
    headers = (
        Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        Path("/usr/include/asm-generic/unistd.h"),
    )
    for column, header in enumerate(headers):
        if not header.exists():
            pytest.skip(f"{header} is not here")
        pairs = re.findall(r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
        known = {name: int(number) for name, number in pairs}
        tables = f"{jail.ALLOWED}, {jail.CONDITIONAL}, {jail.ABSENT}"
        ours = jail.numbers(tables, column)
        assert len(ours) > 90
        assert {n: known[n] for n in ours if n in known} == {n: ours[n] for n in ours if n in known}


def test_without_a_jail_nothing_runs(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(OSError, match="no filter for the architecture riscv64"):
        jail.seccomp_filter("riscv64", 1, read_only=True)
    monkeypatch.setattr(sandbox, "lacks", lambda mode: f"no {mode} here")
    best_mode.cache_clear()
    with pytest.raises(SigmergeError, match=r"no namespaces.* here; .*no landlock.* here"):
        best_mode()


def test_the_jail_hides_other_files(mode: str, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    said = refused(f"print(open({str(secret)!r}).read())", mode)
    assert ("No such file" if mode == NAMESPACES else "Permission denied") in said
    assert "hunter2" not in execute(f"print(open({str(secret)!r}).read())", SHORT, mode=mode).stdout
