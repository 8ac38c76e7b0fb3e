"""scatter_rewards against its peers: the arguments of ``python -m rl_kernel_native.bench scatter_rewards``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["scatter_rewards", *sys.argv[1:]]))
