"""A package, so that pytest keeps tests/ off sys.path: tests/torch would answer for a torch that is missing."""
