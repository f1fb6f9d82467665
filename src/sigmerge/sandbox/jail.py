"""Runs in a child process before generated code does: shuts the doors, then becomes the program.

Started as a script by sandbox.py with a JSON argument; standard library only. The program comes on
standard input. In a namespace jail it sees the interpreter's files, read-only, and a small empty
folder. Where the kernel refuses namespaces, its Landlock closes all files but those, and nothing
can be written. In both a seccomp filter leaves the program one process without network, signals
to others, or memory beyond its own.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
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
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
ROOT, WORK = "/tmp", "/sandbox"
LANDLOCK = "landlock+seccomp"

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
    _mount("none", ROOT, "tmpfs", NO_SUID, "size=1m,nr_inodes=1k,mode=755")
    for path, handle in shown.items():
        _show(ROOT + path, handle)
    Path(ROOT + WORK).mkdir(parents=True, exist_ok=True)
    size = f"size={settings['disk']},nr_inodes=1k,mode=700,uid={owner},gid={owner}"
    _mount("none", ROOT + WORK, "tmpfs", NO_SUID | NO_DEVICES, size)
    os.chroot(ROOT)
    _mount("none", "/", None, REMOUNT | READ_ONLY | NO_SUID)


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
        _mount("none", target, None, REMOUNT | BIND | READ_ONLY | NO_SUID)


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
    allowed |= {"/dev/null": READS | WRITES_FILE, str(Path.cwd()): READS}
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


FORBIDDEN = """
execve 59 221, execveat 322 281, fork 57 -, vfork 58 -, setsid 112 157, setpgid 109 154,

socket 41 198, connect 42 203, bind 49 200, sendto 44 206, sendmsg 46 211,
sendmmsg 307 269,

tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424,
pidfd_open 434 434, pidfd_getfd 438 438, ptrace 101 117, process_vm_readv 310 270,
process_vm_writev 311 271, process_madvise 440 440, process_mrelease 448 448, kcmp 312 272,
migrate_pages 256 238, move_pages 279 239, setpriority 141 140, ioprio_set 251 30,
sched_setparam 142 118, sched_setscheduler 144 119, sched_setattr 314 274,
sched_setaffinity 203 122,

shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, msgsnd 69 189, msgrcv 70 188,
msgctl 71 187, semget 64 190, semop 65 193, semtimedop 220 192, semctl 66 191, mq_open 240 180,
memfd_create 319 279, memfd_secret 447 447,

mount 165 40, umount2 166 39, mount_setattr 442 442, open_tree 428 428, move_mount 429 429,
fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, pivot_root 155 41,
chroot 161 51, unshare 272 97, setns 308 268, mknod 133 -, mknodat 259 33, chmod 90 -,
fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, lchown 94 -, fchown 93 55,
fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, truncate 76 45,
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15,
fremovexattr 199 16, open_by_handle_at 304 265, inotify_init 253 -, inotify_init1 294 26,
fanotify_init 300 262, fanotify_mark 301 263, quotactl 179 60, quotactl_fd 443 443,

bpf 321 280, perf_event_open 298 241, keyctl 250 219, add_key 248 217, request_key 249 218,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, userfaultfd 323 282,
init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104,
kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89,
syslog 103 116, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266,
adjtimex 159 171, sethostname 170 161, setdomainname 171 162, iopl 172 -, ioperm 173 -,
modify_ldt 154 -, personality 135 92, vhangup 153 58
"""
"""System calls with their numbers on x86-64 and on ARM64.

In this order: other programs; the network; other processes; memory that no limit counts or that
others share; the tree of files, and what Landlock lets pass; the kernel itself.
"""

CONDITIONAL = """clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261, prctl 157 167,
fcntl 72 25, open 2 -, openat 257 56"""
ABSENT = "clone3 435 435, openat2 437 437"
"""Their arguments lie where a filter cannot look; without them libc takes clone and openat."""
NEWEST = 462
"""Later calls, and those of the x32 numbering, are answered as by a kernel that has none."""
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
"""Column of the tables, the kernel's name for it, and its number for seccomp."""

LOAD, IS, ABOVE, ANY_BIT, ANSWER = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
CLONE_THREAD, O_TRUNC = 0x00010000, 0o1000
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15


def numbers(table: str, column: int) -> dict[str, int]:
    """A table's calls on one machine."""
    rows = [row.split() for row in table.replace("\n", " ").split(",") if row.strip()]
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def seccomp_filter(machine: str, process: int, read_only: bool) -> bytes:
    """The kernel's program (classic BPF) that looks at every system call of this process.

    Threads can be made, processes not. Signals reach nobody else, also not by way of a pipe's
    owner. `read_only` closes truncation on opening to read, of which Landlock knows from Linux 6.2.
    """
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"seccomp: no filter for the architecture {machine}")
    column, architecture, _ = MACHINES[machine]
    # Argument, comparison, value, and whether it must hold for the call to be refused.
    closed: dict[str, list[tuple[int, int, int, bool]]] = {
        "clone": [(0, ANY_BIT, CLONE_THREAD, False)],
        "kill": [(0, IS, process, False)],
        "tgkill": [(0, IS, process, False)],
        "prlimit64": [(0, IS, 0, False)],
        "prctl": [(0, IS, PR_SET_PDEATHSIG, True)],
        "fcntl": [(1, IS, command, True) for command in (F_SETOWN, F_SETSIG, F_SETOWN_EX)],
    }
    if read_only:
        closed |= {"open": [(1, ANY_BIT, O_TRUNC, True)], "openat": [(2, ANY_BIT, O_TRUNC, True)]}
    refuse, absent = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    code = [(LOAD, 0, 0, 4), (IS, 1, 0, architecture), (ANSWER, 0, 0, KILL), (LOAD, 0, 0, 0)]
    code += [(ABOVE, 0, 1, NEWEST), (ANSWER, 0, 0, absent)]
    for table, answer in ((FORBIDDEN, refuse), (ABSENT, absent)):
        for number in numbers(table, column).values():
            code += [(IS, 0, 1, number), (ANSWER, 0, 0, answer)]
    for name, number in numbers(CONDITIONAL, column).items():
        tests = closed.get(name, [])
        code.append((IS, 0, 3 * len(tests) + 1, number))
        for argument, comparison, value, holds in tests:
            code.append((LOAD, 0, 0, 16 + 8 * argument))  # the low half; all of these are 32 bits
            code.append((comparison, *((0, 1) if holds else (1, 0)), value))
            code.append((ANSWER, 0, 0, refuse))
        code.append((ANSWER, 0, 0, ALLOW))
    code.append((ANSWER, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def limit(settings: dict[str, Any], processes: bool) -> None:
    """What the kernel enforces on every process of the program."""
    bounds = {
        resource.RLIMIT_CPU: settings["cpu"],
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_FSIZE: settings["disk"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    if processes:
        bounds[resource.RLIMIT_NPROC] = settings["processes"]
    for what, value in bounds.items():
        resource.setrlimit(what, (value, value))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


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


def _die_with_parent() -> None:
    """The kernel kills this process when its parent ends; a change of user forgets it."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    _die_with_parent()
    try:
        if settings["mode"] == LANDLOCK:
            limit(settings, processes=False)
            lock_files(settings)
            become(settings)
        enter_namespaces(settings)
        _die_with_parent()
        child = os.fork()  # the first process of the new process namespace
        if child == 0:
            _die_with_parent()
            limit(settings, processes=True)
            become(settings)
    except OSError as error:
        print(f"jail: {error.strerror}", file=sys.stderr)
        sys.exit(97)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
