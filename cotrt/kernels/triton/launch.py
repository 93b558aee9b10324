"""What every launch shares: how many programs fill a device, powers of two."""

from __future__ import annotations

from functools import cache

import torch

# Enough to send every loop of a persistent kernel round more than once, and no more: a program
# takes milliseconds in the interpreter.
_INTERPRETER_PROCESSORS = 2


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    if device.type != "cuda":
        return _INTERPRETER_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is not less than ``value``, which is at least 1."""
    return 1 << (value - 1).bit_length()
