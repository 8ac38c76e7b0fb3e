"""mismatch_metrics against its peers: the arguments of ``python -m rl_kernel_native.bench mismatch_metrics``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["mismatch_metrics", *sys.argv[1:]]))
