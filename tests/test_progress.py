"""What a log shows of the progress: that it moves, and that a long stage has ended."""

from __future__ import annotations

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
