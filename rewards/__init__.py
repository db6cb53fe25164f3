"""Reward models: one file a reward."""
