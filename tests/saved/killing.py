"""Kills a torch-free writer at random moments: 20 times in a test, in a script at will."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from cotrt.saved.new_file import PREFIX, NewFile
from cotrt.saved.reader import SavedFile

WRITER = Path(__file__).resolve().parent / "endless_writer.py"


def start_writer(script: Path, *arguments: object) -> tuple[subprocess.Popen[bytes], bytes]:
    """A program that has begun to write, and the line in which it said so."""
    command = [sys.executable, str(script), *map(str, arguments)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    said = writer.stdout.readline()
    assert said
    return writer, said


def kill(writer: subprocess.Popen[bytes]) -> None:
    """Kill -9."""
    writer.send_signal(signal.SIGKILL)
    assert writer.wait(30) == -signal.SIGKILL
    assert writer.stdout is not None
    writer.stdout.close()


def kill_while_saving(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill a writer `times` times; what is there after each is whole, or nothing is.

    Returns:
        How many times a whole file was there, and how many times a leftover, which the next
        writer in the folder removed.
    """
    pick, whole, left = random.Random(seed), 0, 0
    path = folder / "branch.safetensors"
    for number in range(times):
        if pick.random() < 0.3:
            path.unlink(missing_ok=True)
        writer, said = start_writer(WRITER, path, number)
        assert said == b"begun\n"
        time.sleep(pick.random() * 0.05)
        kill(writer)
        others = [name for name in os.listdir(folder) if name != path.name]
        assert len(others) <= 1 and all(name.startswith(PREFIX) for name in others), others
        if path.exists():
            SavedFile(path).close()  # which checks every byte
            whole += 1
        if others:
            left += 1
            with NewFile(folder / "next") as following:
                following.commit()
            expected = {"next", path.name} if path.exists() else {"next"}
            assert set(os.listdir(folder)) == expected
            (folder / "next").unlink()
    return whole, left
