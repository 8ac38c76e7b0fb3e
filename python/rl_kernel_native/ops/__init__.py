"""Operators, one module each; the public names are re-exported by :mod:`rl_kernel_native`."""
