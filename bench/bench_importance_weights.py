"""importance_weights against its peers: the arguments of ``python -m rl_kernel_native.bench importance_weights``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["importance_weights", *sys.argv[1:]]))
