"""A package, so that pytest keeps tests/ off sys.path. Otherwise tests/torch would be imported where torch is
missing."""
