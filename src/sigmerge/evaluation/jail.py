"""Runs in a child process before generated code does: shuts the doors, then becomes the program.

Started as a script by sandbox.py with a JSON argument; standard library only. The program comes on
standard input. In a namespace jail the program sees the interpreter's files, read-only, and a small
empty folder; it has no network, no other processes, no privileges. Where the kernel refuses
namespaces, Python's audit events forbid the same things (`walled`), and in `landlock` mode the
kernel's Landlock also closes all files but those, TCP, and signals to other processes.
"""

from __future__ import annotations

import ctypes
import json
import os
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
    """No file can be opened but what is to be seen, to read, and the working folder's, to write."""
    version = _landlock(LANDLOCK_CREATE, None, 0, 1)
    handled = ALL_TO_MAKE_SYM
    for since, right in ((2, REFER), (3, TRUNCATE), (5, DEVICE_CONTROL)):
        handled |= right if version >= since else 0
    network, scope = (0b11 if version >= 4 else 0), (0b11 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", handled, network, scope)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _landlock(LANDLOCK_CREATE, attributes, size, 0)
    allowed = dict.fromkeys(settings["visible"], READS)
    allowed |= {"/dev/null": READS | WRITES_FILE, str(Path.cwd()): handled}
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


def become(settings: dict[str, Any], walled: bool) -> NoReturn:
    """Replace this process by the interpreter that runs the program from standard input."""
    here = str(Path.cwd())
    environment = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
                   "HOME": here, "TMPDIR": here, "LANG": "C.UTF-8"}  # fmt: skip
    walls = WALLS if walled else ""
    before = "".join(f"import {module}\n" for module in settings["preload"])
    loader = f"import sys; sys.path += {settings['path']!r}\n{before}{walls}{LOADER}"
    sys.stdout.flush()
    command = [settings["python"], "-I", "-S", "-B", "-c", loader]
    os.execve(command[0], command, environment)


LOADER = """
import os
_size = int(sys.stdin.buffer.readline())
_program = sys.stdin.buffer.read(_size).decode()
exec(compile(_program, "<program>", "exec"), {"__name__": "__main__"})
"""

WALLS = """
import os as _os
def _wall(event, arguments, _root=_os.getcwd(), _norm=_os.path.realpath):
    closed = ("socket.", "subprocess.", "os.system", "os.fork", "os.exec", "os.spawn",
              "os.posix_spawn", "os.kill", "os.killpg", "signal.pthread_kill", "ctypes.",
              "os.setpriority", "shutil.", "pty.")
    if event.startswith(closed):
        raise PermissionError(f"{event} is not allowed here")
    writes = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink",
              "os.truncate", "os.chmod", "os.chown", "os.utime")
    if event in writes or event == "open":
        name, mode, flags = (list(arguments) + [None, None])[:3]
        harmless = event == "open" and not (flags or 0) & 0o3103
        if isinstance(name, int):
            return
        path = _norm(_os.fsdecode(name))
        if path.startswith("/proc/") and not path.startswith("/proc/self/"):
            raise PermissionError(f"{path} is not allowed here")
        if not harmless and not (path + "/").startswith(_root + "/"):
            raise PermissionError(f"{path} may not be written")
sys.addaudithook(_wall)
"""


def _die_with_parent() -> None:
    """The kernel kills this process when its parent ends; a change of user forgets it."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    _die_with_parent()
    try:
        if settings["mode"] == "namespaces":
            enter_namespaces(settings)
        else:
            os.setsid()
            limit(settings, processes=False)
            if settings["mode"] == "landlock":
                lock_files(settings)
    except OSError as error:
        print(f"jail: {error}", file=sys.stderr)
        sys.exit(97)
    if settings["mode"] != "namespaces":
        become(settings, walled=True)
    _die_with_parent()
    child = os.fork()  # the first process of the new process namespace; all others die with it
    if child == 0:
        _die_with_parent()
        limit(settings, processes=True)
        become(settings, walled=False)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
