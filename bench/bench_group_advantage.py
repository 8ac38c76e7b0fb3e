"""group_advantage against its peers: the arguments of ``python -m rl_kernel_native.bench group_advantage``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["group_advantage", *sys.argv[1:]]))
