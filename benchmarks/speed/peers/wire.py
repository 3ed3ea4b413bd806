"""How a process that is timed talks to the one that tells it when to work. Standard library only: peers import it too.

Its answers are lines on standard output that begin with "@"; libraries may print what they like beside them. What it is told
are lines on standard input.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any


def tell(**facts: Any) -> None:
    """One answer."""
    print("@" + json.dumps(facts), flush=True)


def heard() -> dict[str, Any]:
    """What it is told next; where nobody is left to tell anything, the process ends."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    return json.loads(line)


def peak_bytes() -> int:
    """Largest resident memory of this process so far, file-backed pages included.

    Not ru_maxrss where it can be helped: that begins with what the parent held when this process was made.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def vowels(text: str) -> float:
    """A reward with signal in any text: the share of vowels among its letters."""
    letters = [c for c in text.lower() if c.isalpha()]
    return sum(c in "aeiou" for c in letters) / len(letters) if letters else 0.0
