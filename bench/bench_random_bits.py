"""random_bits against its peers: the arguments of ``python -m rl_kernel_native.bench random_bits``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["random_bits", *sys.argv[1:]]))
