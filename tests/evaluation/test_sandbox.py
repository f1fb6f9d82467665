"""The sandbox: programs that try to break out, in the kernel's jail and behind Python's walls."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sigmerge.errors import SigmergeError
from sigmerge.evaluation.sandbox import MODES, Limits, execute, require_permission, works

SHORT = Limits(seconds=3, cpu=2, memory=1 << 30, processes=8, disk=1 << 20, output=1 << 16)

pytestmark = pytest.mark.parametrize("mode", [mode for mode in MODES if works(mode)])


def refused(program: str, mode: str, limits: Limits = SHORT) -> str:
    """Run what must fail; what the program said."""
    outcome = execute(f"{program}\nprint('BROKE OUT')", limits, mode=mode)
    assert "BROKE OUT" not in outcome.stdout
    assert outcome.status != "ok"
    return outcome.stderr


def test_a_program_runs_in_an_empty_folder(mode: str):
    program = "import os; open('a', 'w').write('x'); print(os.listdir('.'), 6 * 7)"
    outcome = execute(program, SHORT, mode=mode)
    assert (outcome.status, outcome.stdout, outcome.mode) == ("ok", "['a'] 42\n", mode)


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
    refused("import socket; socket.create_connection(('1.1.1.1', 53), 1)", mode)
    refused("import socket; socket.create_connection(('127.0.0.1', 22), 1)", mode)


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


def test_fork_bomb(mode: str):
    """It must end, and leave no process behind."""
    start = time.perf_counter()
    outcome = execute("import os\nwhile True: os.fork()", SHORT, mode=mode)
    assert outcome.status != "ok"
    assert time.perf_counter() - start < 10
    time.sleep(0.2)
    alive = [p for p in Path("/proc").glob("[0-9]*/environ") if _holds(p, b"PYTHONHASHSEED=0\0")]
    assert not alive


def _holds(path: Path, text: bytes) -> bool:
    try:
        return path.read_bytes().startswith(text)
    except OSError:
        return False


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
    refused(f"open({str(target)!r}, 'w').write('gone')", mode)
    refused(f"import os; os.remove({str(target)!r})", mode)
    refused("open('/usr/evil', 'w').write('x')", mode)
    refused("open('/evil', 'w').write('x')", mode)
    assert target.read_text() == "here"


def test_other_programs(mode: str, tmp_path: Path):
    target = tmp_path / "made"
    execute(f"import os; os.system('touch {target}')", SHORT, mode=mode)
    execute(f"import subprocess; subprocess.run(['touch', {str(target)!r}])", SHORT, mode=mode)
    assert not target.exists()


def test_the_jail_hides_other_files(mode: str, tmp_path: Path):
    if mode == "walled":
        pytest.skip("the walls of Python let files be read")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    said = refused(f"print(open({str(secret)!r}).read())", mode)
    assert ("No such file" if mode == "namespaces" else "Permission denied") in said
    assert "hunter2" not in execute(f"print(open({str(secret)!r}).read())", SHORT, mode=mode).stdout
