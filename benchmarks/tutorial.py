"""The tutorial from an empty environment, with times: python -m benchmarks.tutorial WHEEL.

Every command of docs/tutorial.md runs as it stands in one shell in an empty folder, with an empty
home and nothing in a cache; only the name of the distribution is that of the wheel, since the
package index does not have it yet. What it prints goes into docs/transcript.md.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.docs.site_pages import DOCS, blocks, commands

TUTORIAL = DOCS / "tutorial.md"
PAGE = DOCS / "transcript.md"
CONSTRAINTS = DOCS.parent / "constraints.txt"
END = "=== end of a command"
MOST_LINES = 24
PROGRESS = r"[a-z ]+: \d|WARNING|\[notice"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory() as folder:
        rows = [*followed(Path(folder), wheel)]
    PAGE.write_text(page(rows, wheel.name), encoding="utf-8")
    print(f"{PAGE}: {len(rows)} commands, {sum(seconds for _, seconds, _ in rows):.0f} s")


def followed(home: Path, wheel: Path) -> list[tuple[str, float, str]]:
    """Every command with its seconds and what it printed."""
    work = home / "work"
    work.mkdir()
    for block in blocks(TUTORIAL):
        if block.name is not None:
            (work / block.name).write_text(block.text, encoding="utf-8")
    kept = {
        key: value for key, value in os.environ.items() if key in ("PATH", "LANG") or "PIP_" in key
    }
    kept |= {"HOME": str(home), "PIP_NO_CACHE_DIR": "1", "PIP_CONSTRAINT": str(CONSTRAINTS)}
    shell = subprocess.Popen(
        ["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd=work, env=kept,
    )  # fmt: skip
    assert shell.stdin is not None and shell.stdout is not None
    rows = []
    for command in commands(TUTORIAL):
        run = command.replace("'sigmerge-llm[demo]'", f"'{wheel}[demo]'")
        began = time.perf_counter()
        shell.stdin.write(f"{run}\necho; echo {END} $?\n")
        shell.stdin.flush()
        lines = []
        for line in shell.stdout:
            if line.startswith(END):
                assert line.split()[-1] == "0", f"{command}: {''.join(lines)}"
                break
            lines.append(line)
        said = "".join(lines).strip().replace(f"{work}/", "")
        rows.append((command, time.perf_counter() - began, said))
        print(f"{rows[-1][1]:7.1f} s  {command}", flush=True)
    shell.stdin.close()
    shell.wait()
    return rows


def page(rows: list[tuple[str, float, str]], wheel: str) -> str:
    installed = sum(seconds for command, seconds, _ in rows[:2])
    whole = sum(seconds for _, seconds, _ in rows)
    load = os.getloadavg()[2]
    text = (
        "# A transcript of the tutorial\n\n`python -m benchmarks.tutorial WHEEL` wrote this page: "
        "the commands of [the tutorial](tutorial.md), one after the other, in an empty "
        "environment, from an empty home and without a cache of pip, in the "
        "versions of `constraints.txt`. "
        f"{whole / 60:.1f} minutes in all, {installed / 60:.1f} of them the installation, on "
        f"{os.cpu_count()} cores that other work had busy meanwhile: {load:.0f} programs wanted to "
        f"run at a time, a mean over 15 minutes. {datetime.now(UTC):%Y-%m-%d}, `{wheel}`. Lines of "
        "progress are left out.\n"
    )
    for command, seconds, said in rows:
        shown = [line for line in said.splitlines() if not re.match(PROGRESS, line)]
        if command.startswith("pip "):
            shown = [f"{shown[-1][:80]} …"]  # what was installed; not where it came from
        if len(shown) > MOST_LINES:
            shown = [*shown[:MOST_LINES], f"… {len(shown) - MOST_LINES} lines more"]
        text += (
            f"\n{seconds:.1f} s\n\n```text\n$ {command}\n"
            + "".join(f"{x}\n" for x in shown)
            + "```\n"
        )
    return text


if __name__ == "__main__":
    main()
