"""Seeds of roots, children and outputs."""

from __future__ import annotations

from cotrt.sampling.seeds import child_seed, normalize_seed, output_seed, root_seed


def test_golden_values_never_change() -> None:
    # A program run again with the next version draws what it drew before.
    assert root_seed(0, 0) == 0xDBE9C09627D460EE
    assert child_seed(0, 0) == 0x1DF5DF97578D90C0
    assert child_seed(12345, 7) == 0x51BF560D54F74A2D
    assert output_seed(0, 1) == 0xC7D4FB523151198


def test_output_zero_has_the_seed_itself() -> None:
    assert output_seed(42, 0) == 42
    assert output_seed(-1, 0) == normalize_seed(-1) == 2**64 - 1
    assert output_seed(2**64 - 1, 3) == output_seed(-1, 3)


def test_no_two_of_a_family_are_alike() -> None:
    seeds = [
        make(seed, i) for make in (root_seed, child_seed) for seed in (0, 1) for i in range(500)
    ]
    seeds += [output_seed(seed, i) for seed in (0, 1) for i in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_grandchildren_depend_on_the_whole_path() -> None:
    paths = {child_seed(child_seed(root_seed(7, 0), i), j) for i in range(30) for j in range(30)}
    assert len(paths) == 900
