"""Times operators and their peers side by side in one process: ``python -m rl_kernel_native.bench logprob``."""
