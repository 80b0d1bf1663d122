"""The project stays small: lines of Python in tracked files, which only a change of these numbers lets grow."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = {"lineartime": 20_479, "benchmarks": 4_690, "studies": 960, "tests": 20_240}
"""The aim is 16,400, 3,500, 1,000 and 16,000."""


def test_no_part_of_the_project_grows() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = dict.fromkeys(MOST, 0)
    for name in listed.split():
        folder = name.split("/")[0]
        if folder in lines and (ROOT / name).exists():
            lines[folder] += (ROOT / name).read_bytes().count(b"\n")
    assert not {folder: n for folder, n in lines.items() if n > MOST[folder]}, lines
