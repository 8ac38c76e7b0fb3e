"""rms_norm against its peers: the arguments of ``python -m rl_kernel_native.bench rms_norm``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["rms_norm", *sys.argv[1:]]))
