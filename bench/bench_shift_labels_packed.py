"""shift_labels_packed against its peers: the arguments of ``python -m rl_kernel_native.bench shift_labels_packed``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["shift_labels_packed", *sys.argv[1:]]))
