"""masked_whiten against its peers: the arguments of ``python -m rl_kernel_native.bench masked_whiten``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["masked_whiten", *sys.argv[1:]]))
