"""linear_logprob against its peers: the arguments of ``python -m rl_kernel_native.bench linear_logprob``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["linear_logprob", *sys.argv[1:]]))
