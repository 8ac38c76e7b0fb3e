"""silu_mul against its peers: the arguments of ``python -m rl_kernel_native.bench silu_mul``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["silu_mul", *sys.argv[1:]]))
