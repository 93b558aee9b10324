"""The compiled module, where this installation has one.

Everything native goes through `module`; nothing else imports ``_native``.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidRequestError

logger = logging.getLogger("cotrt")

BUILD_HINT = "install a C++ compiler and run `pip install --force-reinstall --no-deps cotrt`"


@cache
def _load() -> tuple[Any, str]:
    """The module and "", or None and why there is none; says it once in the log."""
    try:
        found = importlib.import_module(f"{__package__}._native")
        if warning := _passed_over(found):
            logger.warning("Running on the %s kernels: %s.", found.isa(), warning)
        return found, ""
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}._native":
            raise
        reason = f"cotrt was installed without its native kernels ({BUILD_HINT})"
    except ImportError as error:
        reason = f"the native kernels cannot be opened ({error}; {BUILD_HINT})"
    except RuntimeError as error:  # COTRT_CPU_ISA names what this machine does not run
        raise InvalidRequestError(f"{error}; unset it or name one of these.") from error
    logger.warning("Running on plain torch, several times slower: %s.", reason)
    return None, reason


def missing_reason() -> str | None:
    """Why there are no native kernels here; None where there are."""
    return _load()[1] or None


def module() -> Any:
    """The compiled module; a bug of ours where `missing_reason` was not asked first."""
    native, reason = _load()
    assert native is not None, reason
    return native


def isa() -> str:
    """The instruction set in use: amx, avx512bf16, avx2 or generic."""
    name: str = module().isa()
    return name


def build_mark() -> str:
    """Equal for one compiled module: 16 hexadecimal digits."""
    data = Path(module().__file__).read_bytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def isa_warning() -> str | None:
    """Why it is not the best that this machine has, where nobody asked for it; else None."""
    return _passed_over(module())


def _passed_over(native: Any) -> str | None:
    if native.isa() == native.available_isas()[0]:
        return None
    return str(native.isa_warning()) or None


def dtype_of(tensor: Tensor) -> Any:
    """The native name of a tensor's dtype."""
    names = {
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
        torch.int8: "int8",
    }
    return getattr(module().DType, names[tensor.dtype])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the kernels compute and store for a model's dtype: float16 becomes float32."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def set_num_threads(num_threads: int | None) -> int:
    """Size of the pool of this process; None: the cores that it may use."""
    native = module()
    if num_threads is None:
        num_threads = int(native.default_num_threads())
    native.set_num_threads(num_threads)
    return num_threads
