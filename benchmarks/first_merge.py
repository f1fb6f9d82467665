"""The first merge after an installation: that of the demo's first recipe, verified.

    python benchmarks/first_merge.py

Needs the core alone, and writes into the folder where it is called. Its bytes are those of
tests/same_bytes.json on every machine.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from sigmerge.nano.files import POOL, RECIPES

KNOWN = Path(__file__).parents[1] / "tests" / "same_bytes.json"


def main() -> None:
    recipe = (RECIPES / "linear.yaml").read_text(encoding="utf-8").partition("repair:")[0]
    named = recipe.replace("../pool/", f"{POOL.as_posix()}/")
    Path("recipe.yaml").write_text(named, encoding="utf-8")
    for words in (["merge", "recipe.yaml", "merged"], ["verify", "merged", "--deep"]):
        subprocess.run([sys.executable, "-m", "sigmerge", *words], check=True)
    made = hashlib.sha256(Path("merged", "model.safetensors").read_bytes()).hexdigest()
    if made != json.loads(KNOWN.read_text(encoding="utf-8"))["rows"]["exact: linear, preset paper"]:
        sys.exit(f"other bytes than in {KNOWN.name}: {made}")


if __name__ == "__main__":
    main()
