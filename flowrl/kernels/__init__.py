"""Transition kernels: one file a sampling law."""
