"""Times operators in one process side by side with their peers, which are other implementations of the same operator.
Example: ``python -m rl_kernel_native.bench logprob``."""
