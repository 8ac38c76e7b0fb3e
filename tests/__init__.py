"""tests/ is a package, so that pytest does not add it to sys.path. Otherwise `import torch` would find tests/torch
where torch is missing."""
