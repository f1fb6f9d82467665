"""Programs that set out to forge their verdict: none of them passes.

Each defines `double` wrongly and attacks the judge instead. The verdict is made of the values that
the calls return, in a process that starts when the program is gone.
"""

from __future__ import annotations

from typing import Any

import pytest

from sigmerge.evaluation.harnesses import code
from sigmerge.evaluation.harnesses.code import check
from sigmerge.sandbox.run import Outcome
from tests.evaluation.harnesses.test_code import PROBLEM

EVERYWHERE = """
import os
def shout(text):
    for number in range(64):
        try: os.write(number, text)
        except OSError: pass
"""
NUMBERS = 'b\'["ready"]\\n["int", "0x2"]\\n["int", "0x4"]\\n\''
FORGERIES = {
    "leaves early": "import os\nos._exit(0)",
    "prints success": "print('pass', flush=True)\nimport sys\nsys.exit(0)",
    "writes success to every descriptor": f"{EVERYWHERE}shout(b'pass')\nos._exit(0)",
    "writes at exit": f"{EVERYWHERE}import atexit\natexit.register(shout, b'pass')",
    "writes lines of its own": f"{EVERYWHERE}shout({NUMBERS} * 2)\nos._exit(0)",
    "writes lines in its calls": f"""{EVERYWHERE}
def double(x):
    shout(b'["int", "0x2"]\\n')
    return 2""",
    "equals everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def double(x): return Equal()""",
    "is an int that equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def double(x): return Equal(7)""",
    "is a float near everything": """
class Near(float):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    __hash__ = float.__hash__
def double(x): return Near(7)""",
    "lies about its class": """
class Meta(type):
    def __eq__(cls, other): return True
    def __instancecheck__(cls, value): return True
    __hash__ = type.__hash__
class Liar(metaclass=Meta):
    __class__ = int
    def __eq__(self, other): return True
    def __index__(self): return 2
def double(x): return Liar()""",
    "is an array that equals everything": """
import numpy
class Equal(numpy.ndarray):
    def __eq__(self, other): return True
def double(x): return numpy.zeros(1).view(Equal)""",
    "reads the caller's frames": """
import sys
def double(x):
    frame, found = sys._getframe(), []
    while frame:
        for space in (frame.f_locals, frame.f_globals):
            found += [space.get(n) for n in ('expected', 'wanted', 'reference', 'answers')]
            job = space.get('job')
            if isinstance(job, dict):
                found += [job.get(n) for n in ('expected', 'reference', 'answers')]
        frame = frame.f_back
    known = [each for each in found if each is not None]
    return known[0] if known else None""",
    "searches the heap": """
import gc
def double(x):
    for each in gc.get_objects():
        if isinstance(each, dict) and ({'expected', 'reference'} & set(map(str, each))):
            space = {}
            exec(str(each.get('reference', '')), space)
            return space['double'](x)""",
    "patches the builtins": """
import builtins
builtins.isinstance = lambda *_: True
builtins.len = lambda *_: 4
builtins.hex = lambda *_: '0x2'
def double(x): return None""",
    "patches json": """
import json
json.dumps = lambda value, **_: '["int", "0x2"]'
def double(x): return None""",
    "patches the encoder": """
import __main__, sys
space = sys._getframe(1).f_globals
space['encode'] = lambda value, depth=0: ['opaque']
def double(x): return None""",
    "plants modules": """
import itertools, sys, types
sys.modules['recorded'] = types.SimpleNamespace(answers=itertools.repeat(2))
sys.modules['evalplus.eval'] = types.SimpleNamespace(unsafe_execute=lambda *a: None)
def double(x): return None""",
    "replaces evalplus": """
import evalplus.eval as e
e.unsafe_execute = lambda *a: setattr(a[8], 'value', 0)
def double(x): return None""",
    "writes into evalplus": """
import os, sys
for folder in sys.path:
    file = os.path.join(folder, 'evalplus', 'eval', '__init__.py')
    try: open(file, 'a').write('def unsafe_execute(*a): a[8].value = 0')
    except OSError: pass
def double(x): return None""",
    "uses ctypes on small numbers": """
import ctypes
for wrong, right in ((7, 2), (8, 4)):
    ctypes.memmove(id(wrong) + 24, id(right) + 24, 4)
def double(x): return 7""",
    "reads other processes": """
import glob, re
def double(x):
    for file in glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ'):
        try: text = open(file, 'rb').read()
        except OSError: continue
        if b'return 2' in text:
            return 2 * x
    return None""",
    "ends with SystemExit": "def double(x): raise SystemExit(0)",
    "catches the end": """
import signal
signal.signal(signal.SIGALRM, lambda *_: None)
def double(x):
    try: raise SystemExit(0)
    finally: return None""",
    "sends values nobody can decode": f"""{EVERYWHERE}
shout(b'["ready"]\\n["array", "O", [1], ["list"]]\\n["range", 0, 1e99]\\n' * 3)
os._exit(0)""",
    "sends a pickle": f"""{EVERYWHERE}
import pickle
class Run:
    def __reduce__(self): return (print, ('pass',))
shout(b'["ready"]\\n' + (pickle.dumps(Run()).hex().encode() + b'\\n') * 5)
os._exit(0)""",
    "is not a number": "def double(x): return float('nan')",
    "answers from another thread": f"""{EVERYWHERE}
import threading, time
def late():
    time.sleep(0.2)
    shout(b'pass')
threading.Thread(target=late, daemon=True).start()
def double(x):
    time.sleep(0.1)
    return None""",
}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES)
def test_forgeries_fail(program: str):
    pytest.importorskip("evalplus")
    wrong = "def double(x):\n    return None\n" if "def double" not in program else ""
    assert check(PROBLEM, "humaneval", f"{wrong}{program}\n") == "fail"


def test_a_plain_program_passes_beside_them():
    """Else the list above would prove nothing."""
    pytest.importorskip("evalplus")
    assert check(PROBLEM, "humaneval", "def double(x):\n    return x + x\n") == "pass"


def printing(text: str) -> Any:
    return lambda *_, **__: Outcome("ok", 0, text, "", 0.1, "none")


@pytest.mark.parametrize("printed", ["\ufffd\n" * 6, "W10=\n" * 7, "W10=" * 9])
def test_what_is_no_list_of_values_is_not_judged(monkeypatch: pytest.MonkeyPatch, printed: str):
    """A program may print 256 MiB, and to pass it on took sixteen times as much memory here."""
    monkeypatch.setattr(code, "_reference", lambda job: ([[0.1] * 2] * 2, ""))
    monkeypatch.setattr(code, "_judged", lambda job: pytest.fail("it was judged"))
    monkeypatch.setattr(code, "execute", printing(printed))
    assert check(PROBLEM, "humaneval", "") == "fail"


@pytest.mark.parametrize(
    "printed",
    ["x\n", "{}\n", "[" * 9000 + "\n", '{"times": [[1, 2], 3]}\n', '{"times": [["x"]]}\n'],
)
def test_a_reference_that_prints_for_itself_fails(monkeypatch: pytest.MonkeyPatch, printed: str):
    """It is part of a record, which a stranger may have written."""
    monkeypatch.setattr(code, "execute", printing(printed))
    code._reference.cache_clear()
    assert code._reference('{"inputs": [[1], [2]]}') is None
    code._reference.cache_clear()
