"""Compare a rollout with a training forward and find the first operator whose bits differ. See cli.py."""
