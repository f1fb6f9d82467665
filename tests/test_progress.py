"""What a log shows of the progress: that it moves, and that a long stage has ended."""

from __future__ import annotations

import io
import re
import sys

import pytest

from sigmerge import progress


def test_a_log_moves_and_names_the_end_of_long_stages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    with progress.shown() as report:
        for seconds, stage, done, total in (
            (0, "short", 1, 2), (1, "short", 2, 2),
            (2, "math", 30, 300), (4, "safety", 30, 300), (12, "math", 60, 300),
            (21, "math", 90, 300), (22, "safety", 60, 300),
            (30, "math", 300, 300), (31, "safety", 300, 300), (31, "experts", 2, 2),
            (32, "math", 1, 2), (33, "math", 2, 2),
        ):  # fmt: skip
            clock[0] = float(seconds)
            report(stage, done, total)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["math: 90/300", "math: 300/300", "safety: 300/300"]


def test_a_program_without_streams_has_a_silent_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with progress.shown() as report:
        assert report is progress.silent


class Terminal(io.StringIO):
    """What the cursor's movements leave of what was written."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        shown, at = [""], 0
        for piece in re.findall(r"\x1b\[(\d*)([FJK])|(\n)|([^\x1b\n]+)", self.getvalue()):
            count, move, end, text = piece
            if move == "F":
                at -= int(count)
            elif move == "J":
                del shown[at:]
                shown.append("")
            elif end:
                at += 1
                shown += [""] * (at + 1 - len(shown))
            elif text:
                shown[at] = text
        return shown[:-1]


def test_bars_stand_below_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, terminal = [0.0], Terminal()
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.shown() as report:
        for second, stage, done in ((0, "blocks", 0), (1, "hashing", 1), (10, "blocks", 10)):
            clock[0] = float(second)
            report(stage, done, 40)
        full, empty = "━" * progress.BAR, "─" * progress.BAR
        quarter = full[:7] + empty[7:]
        assert terminal.lines == [
            f"blocks  {quarter} 10/40, 30 s left",
            f"hashing {empty} 1/40, 5.8 min left",
        ]
        print("warning: something", file=sys.stderr)
        clock[0] = 40
        report("blocks", 40, 40)
    assert sys.stderr is terminal
    assert terminal.lines == [
        "warning: something",
        f"blocks  {full} 40/40",
        f"hashing {empty} 1/40, 25 min left",
    ]
