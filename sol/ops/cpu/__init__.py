"""The CPU backend: one C++ library behind a C ABI (csrc/sol_cpu.h) that walks a program's list of ops, one call a
step.

`native` is the library as Python sees it, `packing` brings weights into its layout, `executor` runs a program on it.
"""
