"""sample against its peers: the arguments of ``python -m rl_kernel_native.bench sample``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["sample", *sys.argv[1:]]))
