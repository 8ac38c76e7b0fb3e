"""value_loss against its peers: the arguments of ``python -m rl_kernel_native.bench value_loss``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["value_loss", *sys.argv[1:]]))
