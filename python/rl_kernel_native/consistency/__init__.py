"""Compares a rollout with a training forward, and finds the first operator whose bits differ. See cli.py."""
