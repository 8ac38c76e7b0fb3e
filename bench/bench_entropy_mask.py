"""entropy_mask against its peers: the arguments of ``python -m rl_kernel_native.bench entropy_mask``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["entropy_mask", *sys.argv[1:]]))
