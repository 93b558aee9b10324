"""Native kernels for CPUs: C++ in ``csrc/``, compiled once an instruction set (docs/kernels.md)."""
