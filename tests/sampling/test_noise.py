"""The noise: its golden values, its bounds, and torch's equality with numpy to the bit."""

from __future__ import annotations

import numpy as np
import torch

from cotrt.kernels.reference import sample as kernel
from cotrt.sampling import noise

SEEDS = np.array([0, 1, 2**64 - 1, 42], np.uint64)
EPOCHS = np.array([0, 0, 3, 1], np.uint32)
POSITIONS = np.array([0, 1, 100000, 7], np.int64)


def test_golden_vector() -> None:
    """What every backend must give."""
    low, high = noise.row_keys(SEEDS, EPOCHS, POSITIONS)
    assert low.tolist() == [0xF9C57863, 0x3C1CFAB9, 0x69C14C5C, 0xDB235786]
    assert high.tolist() == [0x33FE8BD4, 0x5E68F5DF, 0x5E6199C6, 0x6A7F554F]
    bits = noise.noise_bits(low[:, None], high[:, None], np.array([[0, 1, 151935]]))
    assert bits.tolist() == [
        [0x8AC489CC, 0x1E19E2D3, 0x471D4C3D],
        [0xCCA49BE2, 0x536F72C8, 0xA45F99D1],
        [0x33BD0FD0, 0x0DA8F1B3, 0x01385CD2],
        [0xE4F5AB98, 0xD2C1DEA2, 0x4658BBB5],
    ]


def test_torch_equals_numpy_to_the_bit() -> None:
    low, high = noise.row_keys(np.arange(7, dtype=np.uint64), np.arange(7, dtype=np.uint32),
                               np.arange(7) * 1000)  # fmt: skip
    ids = np.concatenate([np.arange(3000), [2**31 - 1, 151935, 1 << 20]])
    expected = noise.noise_bits(low[:, None], high[:, None], ids[None])
    keys = (torch.from_numpy(half.view(np.int32).copy())[:, None] for half in (low, high))
    bits = kernel.noise_bits(*keys, torch.from_numpy(ids.astype(np.int32))[None])
    assert np.array_equal(bits.numpy().view(np.uint32), expected)
    # Logarithms may differ in the last place between libraries.
    assert np.allclose(kernel.gumbel(bits).numpy(), noise.gumbel(expected), rtol=1e-14, atol=0)
    for name in ("MAX_GUMBEL", "GOLDEN", "MULTIPLY_1", "MULTIPLY_2"):
        assert getattr(kernel, name) == getattr(noise, name)


def test_uniform_is_exact_inside_zero_and_one_and_bounds_the_noise() -> None:
    ends = noise.uniform(np.array([0, 2**32 - 1], np.uint32))
    assert ends.dtype == np.float32 and ends.tolist() == [2.0**-24, 1 - 2.0**-24]
    low, high = noise.gumbel(np.array([0, 2**32 - 1], np.uint32))
    assert low > -2.82 and 16.63 < high < noise.MAX_GUMBEL


def test_bits_are_even_over_tokens_and_positions() -> None:
    low, high = noise.row_keys(np.full(400, 5, np.uint64), np.zeros(400, np.uint32), np.arange(400))
    u = noise.uniform(noise.noise_bits(low[:, None], high[:, None], np.arange(1000)[None]))
    counts = np.histogram(u, 64, (0, 1))[0]
    chi_square = ((counts - u.size / 64) ** 2 / (u.size / 64)).sum()
    assert chi_square < 63 + 4 * np.sqrt(126)
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):  # neighbours in id, in position
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * np.sqrt(a.size) < 4


def test_key_depends_on_seed_epoch_and_position_alone_and_on_each() -> None:
    base = noise.row_keys(SEEDS[:1], EPOCHS[:1], POSITIONS[:1])
    for change in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        seed, epoch, position = change
        other = noise.row_keys(SEEDS[:1] + np.uint64(seed), EPOCHS[:1] + np.uint32(epoch),
                               POSITIONS[:1] + position)  # fmt: skip
        assert (other[0] != base[0]).all() and (other[1] != base[1]).all()
