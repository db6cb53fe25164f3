"""Objectives: one file a loss."""
