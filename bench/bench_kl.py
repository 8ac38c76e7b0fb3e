"""kl against its peers: the arguments of ``python -m rl_kernel_native.bench kl``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["kl", *sys.argv[1:]]))
