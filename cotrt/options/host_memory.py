"""How much memory this process may have, and still take: the machine's, or a lower limit.

Containers see the whole machine in ``/proc/meminfo``; what ends them is a limit on one of the
control groups they are in, so every group from the process's own up to the root is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# A limit above this is how cgroup v1 spells "none" (the largest page-aligned 63-bit number).
_NO_LIMIT = 1 << 60


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still allocate, or None where the system does not say.

    Args:
        root: where ``proc`` and ``sys`` lie; another folder in tests.
    """
    bounds = [*_machine(root), *_cgroup_v2(root), *_cgroup_v1(root), *_address_space(root)]
    return max(0, min(bounds)) if bounds else None


def total_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process could have if nothing else ran, or None where that is not said.

    Args:
        root: where ``proc`` and ``sys`` lie; another folder in tests.
    """
    bounds = [*_machine(root, "MemTotal"), *_address_space(root, total=True)]
    bounds += [limit for limit, _ in (*_groups_v2(root), *_groups_v1(root))]
    return min(bounds) if bounds else None


def _machine(root: Path, row: str = "MemAvailable") -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith(f"{row}:"):
            yield int(line.split()[1]) * 1024
            return
    if root != Path("/"):
        return
    if sys.platform == "win32":
        yield _windows_bytes(available=row == "MemAvailable")
        return
    try:
        # macOS does not tell what is free through sysconf; half of it all is a modest guess.
        share = 2 if row == "MemAvailable" else 1
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // share
    except (OSError, ValueError):
        return


def _cgroup_v2(root: Path) -> Iterator[int]:
    for limit, group in _groups_v2(root):
        used = _number(group / "memory.current")
        if used is not None:
            yield limit - used + _reclaimable(group, "inactive_file")


def _cgroup_v1(root: Path) -> Iterator[int]:
    for limit, group in _groups_v1(root):
        used = _number(group / "memory.usage_in_bytes")
        if used is not None:
            yield limit - used + _reclaimable(group, "total_inactive_file")


def _groups_v2(root: Path) -> Iterator[tuple[int, Path]]:
    """The groups that have a limit, and their limits in bytes."""
    for group in _groups(root, controller="", mount=root / "sys/fs/cgroup"):
        limit = _number(group / "memory.max")
        if limit is not None:
            yield limit, group


def _groups_v1(root: Path) -> Iterator[tuple[int, Path]]:
    for group in _groups(root, controller="memory", mount=root / "sys/fs/cgroup/memory"):
        limit = _number(group / "memory.limit_in_bytes")
        if limit is not None:
            yield limit, group


def _groups(root: Path, controller: str, mount: Path) -> Iterator[Path]:
    """The process's group of one controller and all above it, as far as they can be seen.

    A container often sees the path that its group has on the host but only its own part of the
    tree, so folders that are not there are passed over on the way up to the mount.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = mount / path.lstrip("/")
            yield group
            while group != mount and mount in group.parents:
                group = group.parent
                yield group
            return


def _reclaimable(group: Path, key: str) -> int:
    """Bytes of page cache that count as used but are given back when memory is short."""
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _address_space(root: Path, *, total: bool = False) -> Iterator[int]:
    """What ``ulimit -v`` leaves, or allows in all, for schedulers of batch jobs that set it."""
    if sys.platform == "win32" or root != Path("/"):
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    mapped = _read(root / "proc/self/statm").split()
    if limit != resource.RLIM_INFINITY and mapped:
        yield limit if total else limit - int(mapped[0]) * os.sysconf("SC_PAGE_SIZE")


def _windows_bytes(*, available: bool) -> int:
    import ctypes

    class MemoryStatus(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            *((name, ctypes.c_uint64) for name in ("total", "available")),
            *((f"rest_{i}", ctypes.c_uint64) for i in range(5)),
        ]

    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.available if available else status.total)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    value = int(text) if text.isdigit() else None  # "max" means no limit
    return value if value is not None and value < _NO_LIMIT else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
