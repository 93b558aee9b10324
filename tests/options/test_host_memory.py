"""Memory that the process may still take, read from a made-up /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotrt.options.host_memory import available_bytes, total_bytes

MIB = 1 << 20


def write(root: Path, files: dict[str, str | int]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """One with 8,000 MiB to take and no limit."""
    write(
        tmp_path,
        {"proc/meminfo": f"MemTotal: {9000 * 1024} kB\nMemAvailable: {8000 * 1024} kB"},
    )
    return tmp_path


def test_without_a_limit_it_is_what_the_machine_has(machine: Path) -> None:
    assert available_bytes(machine) == 8000 * MIB


def test_a_system_that_says_nothing_gives_none(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_cgroup_v2_the_tightest_group_on_the_way_up_counts(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/jobs/mine",
            "sys/fs/cgroup/jobs/mine/memory.max": "max",
            "sys/fs/cgroup/jobs/mine/memory.current": 100 * MIB,
            "sys/fs/cgroup/jobs/memory.max": 1000 * MIB,
            "sys/fs/cgroup/jobs/memory.current": 400 * MIB,
            "sys/fs/cgroup/jobs/memory.stat": f"anon 5\ninactive_file {50 * MIB}",
        },
    )
    assert available_bytes(machine) == (1000 - 400 + 50) * MIB


def test_cgroup_v2_seen_from_inside_a_container(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/docker/1234",
            "sys/fs/cgroup/memory.max": 500 * MIB,
            "sys/fs/cgroup/memory.current": 100 * MIB,
        },
    )
    assert available_bytes(machine) == 400 * MIB


def test_cgroup_v1(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/jobs/mine\n3:cpuset,cpu:/\n0::/",
            "sys/fs/cgroup/memory/jobs/mine/memory.limit_in_bytes": 300 * MIB,
            "sys/fs/cgroup/memory/jobs/mine/memory.usage_in_bytes": 200 * MIB,
            "sys/fs/cgroup/memory/jobs/mine/memory.stat": f"total_inactive_file {20 * MIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 7000 * MIB,
        },
    )
    assert available_bytes(machine) == 120 * MIB


def test_a_group_over_its_limit_leaves_nothing(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 100 * MIB,
            "sys/fs/cgroup/memory.current": 120 * MIB,
        },
    )
    assert available_bytes(machine) == 0


def test_this_machine_has_some() -> None:
    available = available_bytes()
    assert available is None or available > 0


def test_the_total_is_the_machines_or_the_lowest_limit_whatever_is_used(machine: Path) -> None:
    assert total_bytes(machine) == 9000 * MIB
    write(
        machine,
        {
            "proc/self/cgroup": "4:memory:/mine\n0::/jobs/mine",
            "sys/fs/cgroup/jobs/memory.max": 1000 * MIB,
            "sys/fs/cgroup/jobs/memory.current": 400 * MIB,
        },
    )
    assert total_bytes(machine) == 1000 * MIB
    write(machine, {"sys/fs/cgroup/memory/mine/memory.limit_in_bytes": 700 * MIB})
    assert total_bytes(machine) == 700 * MIB


def test_no_total_where_the_system_says_nothing(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) is None
