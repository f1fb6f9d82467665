"""Runs in a child process before generated code does: shuts the doors, then becomes the program.

Started as a script by sandbox.py with a JSON argument; standard library only. The program comes on
standard input. In a namespace jail it sees the interpreter's files, read-only, and a small empty
folder. Where the kernel refuses namespaces, its Landlock closes all files but those, and nothing
can be written. In both a seccomp filter allows the system calls of one process that computes, and
refuses the rest: network, signals to others, other programs, shared memory, the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x04000000 | 0x20000000 | 0x40000000
"""Mounts, IPC, host name, processes, network."""
NEW_USERS = 0x10000000
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE = 1, 2, 4, 32, 4096, 16384
PRIVATE = 1 << 18
FIRST_FREE_USER = 1_000_000_000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
READING = (1, 2)
"""Root's rights to files of others; Landlock says which."""
ALL_RIGHTS = 64
ROOT, WORK = "/tmp", "/sandbox"
LANDLOCK = "landlock+seccomp"
ORPHAN = 98
"""Exit code of a process whose parent ended while it started."""

libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """A libc function that returns -1 on error."""
    if getattr(libc, name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), data.encode() if data else None)


def enter_namespaces(settings: dict[str, Any]) -> None:
    """New namespaces of every kind, a root folder of our own, and no way back.

    Root needs no user namespace for this, and becomes a user nobody else is: limits on processes
    do not bind root. Anyone else becomes the only user of a namespace.
    """
    root = os.getuid() == 0
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", NEW_NAMESPACES if root else NEW_NAMESPACES | NEW_USERS)
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")
    owner = FIRST_FREE_USER + os.getpid() if root else 1000
    _new_root(settings, owner)
    if root:
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
    os.chdir(WORK)


def _new_root(settings: dict[str, Any], owner: int) -> None:
    """A root folder with nothing in it but what is to be seen and a small folder to write."""
    shown = {path: os.open(path, os.O_PATH) for path in settings["visible"] if Path(path).exists()}
    _mount("none", "/", None, PRIVATE | RECURSIVE)
    _mount("none", ROOT, "tmpfs", NO_SUID | NO_DEVICES, "size=1m,nr_inodes=1k,mode=755")
    for path, handle in shown.items():
        _show(ROOT + path, handle)
    Path(ROOT + WORK).mkdir(parents=True, exist_ok=True)
    size = f"size={settings['disk']},nr_inodes=1k,mode=700,uid={owner},gid={owner}"
    _mount("none", ROOT + WORK, "tmpfs", NO_SUID | NO_DEVICES, size)
    os.chroot(ROOT)
    _mount("none", "/", None, REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES)


def _show(target: str, handle: int) -> None:
    """Make an open file or folder visible at a place in the new root, read-only."""
    source = f"/proc/self/fd/{handle}"
    place = Path(target)
    if Path(source).is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    _mount(source, target, None, BIND | RECURSIVE)
    if not target.startswith(f"{ROOT}/dev/"):
        _seal(target)


MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000


def _seal(target: str) -> None:
    """Read-only, without devices and set-user-id programs: the mount and all mounts below it.

    Before Linux 5.12 only the mount itself can be changed.
    """
    attributes = struct.pack("=QQQQ", 1 | NO_SUID | NO_DEVICES, 0, 0, 0)
    arguments = (AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, len(attributes))
    if libc.syscall(MOUNT_SETATTR, *arguments) == -1:
        if ctypes.get_errno() != errno.ENOSYS:
            code = ctypes.get_errno()
            raise OSError(code, f"mount_setattr: {os.strerror(code)}")
        _mount("none", target, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES)


LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READS, WRITES_FILE, ALL_TO_MAKE_SYM = 0b1101, 0b10, (1 << 13) - 1
REFER, TRUNCATE, DEVICE_CONTROL = 1 << 13, 1 << 14, 1 << 15
"""Landlock's rights to files: execute, read and list; write; those of its first version; later."""


def lock_files(settings: dict[str, Any]) -> None:
    """No file can be opened but what is to be seen, to read; none can be made or written.

    No quota holds for a folder of the user's disk, so the working folder is to be listed only.
    """
    version = _landlock(LANDLOCK_CREATE, None, 0, 1)
    handled = ALL_TO_MAKE_SYM
    for since, right in ((2, REFER), (3, TRUNCATE), (5, DEVICE_CONTROL)):
        handled |= right if version >= since else 0
    network, scope = (0b11 if version >= 4 else 0), (0b11 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", handled, network, scope)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _landlock(LANDLOCK_CREATE, attributes, size, 0)
    allowed = dict.fromkeys(settings["visible"], READS)
    allowed |= {"/dev/null": READS | WRITES_FILE, ".": READS}
    for path, rights in allowed.items():
        if not Path(path).exists():
            continue
        handle = os.open(path, os.O_PATH)
        if not Path(path).is_dir():
            rights &= 0b111 | TRUNCATE | DEVICE_CONTROL
        _landlock(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights & handled, handle), 0)
        os.close(handle)
    _landlock(LANDLOCK_RESTRICT, rules, 0)


def _landlock(number: int, *arguments: Any) -> int:
    """A system call for which libc has no function."""
    result = int(libc.syscall(number, *arguments))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result


ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, preadv2 327 286, pwritev2 328 287, close 3 57, close_range 436 436, lseek 8 62,
stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44,
access 21 -, faccessat 269 48, faccessat2 439 439, getdents 78 -, getdents64 217 61, getcwd 79 17,
chdir 80 49, fchdir 81 50, readlink 89 -, readlinkat 267 78, dup 32 23, dup2 33 -, dup3 292 24,
pipe 22 -, pipe2 293 59, fsync 74 82, fdatasync 75 83, ftruncate 77 46, flock 73 32, fadvise64 221
223, sendfile 40 71, copy_file_range 326 285, umask 95 166, mkdir 83 -, mkdirat 258 34, rmdir 84
-, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, creat 85 -,

mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, brk 12 214, madvise 28 233, mincore 27
232, msync 26 227, membarrier 324 283,

rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, restart_syscall
219 128,

clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -, nanosleep 35 101,
clock_nanosleep 230 115, times 100 153, getitimer 36 102, setitimer 38 103, alarm 37 -,

getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgrp 111 -, getpgid
121 155, getsid 124 156, uname 63 160, sysinfo 99 179, getrusage 98 165, getrlimit 97 163, getcpu
309 168, getrandom 318 278,

futex 202 98, set_robust_list 273 99, get_robust_list 274 100, set_tid_address 218 96, rseq 334
293, arch_prctl 158 -, sched_yield 24 124, sched_getaffinity 204 123, wait4 61 260, waitid 247 95,
exit 60 93, exit_group 231 94,

poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -,
eventfd2 290 19, recvfrom 45 207, recvmsg 47 212, getsockopt 55 209,
getsockname 51 204, getpeername 52 205, shutdown 48 210
"""
"""System calls that a program may make, with their numbers on x86-64 and on ARM64.

In this order: files that are open or may be opened; its own memory; signals to itself; clocks; who
it is; its threads; waiting, and pairs of sockets that lead nowhere else.
"""

CONDITIONAL = """clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261, prctl 157 167,
fcntl 72 25, ioctl 16 29, socketpair 53 199, open 2 -, openat 257 56"""
"""Allowed with some arguments only."""
ABSENT = "clone3 435 435, openat2 437 437"
"""Their arguments lie where a filter cannot look; without them libc takes clone and openat."""
NEWEST = 462
"""Later calls, and those of the x32 numbering, are answered as by a kernel that has none."""
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""Column of the tables, the kernel's name for it, and its number for seccomp."""

LOAD, IS, IS_ABOVE, ANY_BIT, ANSWER = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
CLONE_THREAD, O_TRUNC, AF_UNIX = 0x00010000, 0o1000, 1
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
"""Duplicates, flags and locks of a descriptor; not its owner, who would get signals."""
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""What a terminal is, how much can be read, blocking and closing; not the owner (FIOSETOWN)."""
PRCTL = (15, 16, 0x53564D41)
"""Names of threads and of memory."""


def numbers(table: str, column: int) -> dict[str, int]:
    """A table's calls on one machine."""
    rows = [row.split() for row in table.replace("\n", " ").split(",") if row.strip()]
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


Test = tuple[int, int, int]
"""An argument's place, a comparison and a value."""


def seccomp_filter(machine: str, process: int, read_only: bool) -> bytes:
    """The kernel's program (classic BPF) that looks at every system call of this process.

    What is not listed is refused. Threads can be made, processes not. Signals reach nobody else,
    also not by way of a descriptor's owner. `read_only` closes truncation on opening to read, which
    Landlock handles from Linux 6.2 on.
    """
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"seccomp: no filter for the architecture {machine}")
    column, architecture, _ = MACHINES[machine]
    # A call is allowed if one of its tests holds; `closed` names what must not hold instead.
    allowed: dict[str, list[Test]] = {
        "clone": [(0, ANY_BIT, CLONE_THREAD)],
        "kill": [(0, IS, process)],
        "tgkill": [(0, IS, process)],
        "prlimit64": [(0, IS, 0)],
        "prctl": [(0, IS, option) for option in PRCTL],
        "fcntl": [(1, IS, command) for command in FCNTL],
        "ioctl": [(1, IS, command) for command in IOCTL],
        "socketpair": [(0, IS, AF_UNIX)],
    }
    closed: dict[str, Test] = (
        {"open": (1, ANY_BIT, O_TRUNC), "openat": (2, ANY_BIT, O_TRUNC)} if read_only else {}
    )
    refuse, absent = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    code = [(LOAD, 0, 0, 4), (IS, 1, 0, architecture), (ANSWER, 0, 0, KILL), (LOAD, 0, 0, 0)]
    code += [(IS_ABOVE, 0, 1, NEWEST), (ANSWER, 0, 0, absent)]
    for table, answer in ((ALLOWED, ALLOW), (ABSENT, absent)):
        for number in numbers(table, column).values():
            code += [(IS, 0, 1, number), (ANSWER, 0, 0, answer)]
    for name, number in numbers(CONDITIONAL, column).items():
        tests, answers = allowed.get(name, []), (ALLOW, refuse)
        if name not in allowed:
            tests, answers = [closed[name]] if name in closed else [], (refuse, ALLOW)
        code.append((IS, 0, 3 * len(tests) + 1, number))
        for argument, comparison, value in tests:
            code.append((LOAD, 0, 0, 16 + 8 * argument))  # the low half; all of these are 32 bits
            code += [(comparison, 0, 1, value), (ANSWER, 0, 0, answers[0])]
        code.append((ANSWER, 0, 0, answers[1]))
    code.append((ANSWER, 0, 0, refuse))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def limit(settings: dict[str, Any], others: int) -> None:
    """What the kernel enforces on the program; `others` are threads that its user has already."""
    bounds = {
        resource.RLIMIT_CPU: settings["cpu"],
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_FSIZE: settings["disk"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NPROC: others + settings["processes"],
    }
    for what, value in bounds.items():
        resource.setrlimit(what, (value, value))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def threads_of_user() -> int:
    """How many threads this user has now; the kernel counts them together."""
    user, count = os.getuid(), 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines()[:40]
                          if ":\t" in line)  # fmt: skip
            count += int(fields["Threads"]) if int(fields["Uid"].split()[0]) == user else 0
        except (OSError, KeyError, ValueError):
            continue  # it has ended meanwhile
    return count


def leave_root(settings: dict[str, Any]) -> None:
    """Root becomes a user that nobody else is: limits on threads do not bind root.

    It stays root where that user could not read the interpreter's files; the parent counts its
    threads then, and it has no other of root's rights.
    """
    owner = FIRST_FREE_USER + os.getpid()
    needed = [settings["python"], os.__file__, *settings["path"]]
    try:
        os.setgroups([])
        os.setegid(owner)
        os.seteuid(owner)
        readable = all(os.access(path, os.R_OK, effective_ids=True) for path in needed)
        os.seteuid(0)
        os.setegid(0)
        if readable:
            os.chown(".", owner, owner)
            os.setresgid(owner, owner, owner)
            os.setresuid(owner, owner, owner)
    except PermissionError:
        return  # root without the right to change users, in some containers


def drop_rights() -> None:
    """Root executes the program with its rights to files only; others would lift its limits.

    The kernel refuses numbers of rights that it does not have, and all where root has no say.
    """
    for right in set(range(ALL_RIGHTS)).difference(READING):
        libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(right), 0, 0, 0)


def become(settings: dict[str, Any]) -> NoReturn:
    """Replace this process by the interpreter that runs the program from standard input."""
    here = str(Path.cwd())
    environment = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
                   "HOME": here, "TMPDIR": here, "LANG": "C.UTF-8"}  # fmt: skip
    machine = platform.machine()
    rules = seccomp_filter(machine, os.getpid(), read_only=settings["mode"] == LANDLOCK)
    before = "".join(f"import {module}\n" for module in settings["preload"])
    loader = f"import sys; sys.path += {settings['path']!r}\n{before}{LOADER}"
    call = str(MACHINES[machine][2])
    sys.stdout.flush()
    command = [settings["python"], "-I", "-S", "-B", "-c", loader, call, rules.hex()]
    os.execve(command[0], command, environment)


LOADER = """
import ctypes, os, struct
_size = int(sys.stdin.buffer.readline())
_program = compile(sys.stdin.buffer.read(_size).decode(), "<program>", "exec")
_call, _rules = int(sys.argv[1]), ctypes.create_string_buffer(bytes.fromhex(sys.argv[2]))
del sys.argv[1:]
_described = struct.pack("@HP", len(_rules) // 8, ctypes.addressof(_rules))
_libc = ctypes.CDLL(None, use_errno=True)
if _libc.syscall(ctypes.c_long(_call), ctypes.c_long(1), ctypes.c_long(1), _described):
    sys.exit("jail: seccomp: " + os.strerror(ctypes.get_errno()))
exec(_program, {"__name__": "__main__"})
"""
"""The filter (mode 1, of all threads: flag 1) is set when all is read and nothing else is left."""


def _die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent ends; a change of user forgets it.

    A parent that has ended before sends no signal, and this process has another one then.
    """
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(ORPHAN)


def _die_with_holder(pipe: int) -> None:
    """The same for a process that cannot see its parent, which holds the other end of a pipe."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([pipe], [], [], 0)[0]:
        sys.exit(ORPHAN)


def main() -> None:
    settings = json.loads(sys.argv[1])
    parent = settings["parent"]
    _die_with_parent(parent)
    try:
        if settings["mode"] == LANDLOCK:
            if os.getuid() == 0:
                leave_root(settings)
                drop_rights()
                _die_with_parent(parent)
            limit(settings, threads_of_user())
            lock_files(settings)
            become(settings)
        enter_namespaces(settings)
        _die_with_parent(parent)
        pipe, holder = os.pipe()
        child = os.fork()  # the first process of the new process namespace
        if child == 0:
            os.close(holder)
            _die_with_holder(pipe)
            limit(settings, 0)
            become(settings)
    except OSError as error:
        print(f"jail: {error.strerror}", file=sys.stderr)
        sys.exit(97)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
