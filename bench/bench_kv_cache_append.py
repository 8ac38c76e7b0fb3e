"""kv_cache_append against its peers: the arguments of ``python -m rl_kernel_native.bench kv_cache_append``."""

import sys

from rl_kernel_native.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["kv_cache_append", *sys.argv[1:]]))
