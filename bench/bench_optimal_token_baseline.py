"""optimal_token_baseline against its peers: as ``python -m rl_kernel_native.bench optimal_token_baseline``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["optimal_token_baseline", *sys.argv[1:]]))
