"""Kernels run under Triton's interpreter, on the CPU; tests/conftest.py chooses it."""

from __future__ import annotations

from typing import Any

try:
    from triton.runtime import interpreter
except ImportError:
    pass  # the tests skip themselves
else:
    # Triton 3.6 converts a scalar, an array of one element to it, by int(), which NumPy 2.4 refuses.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
