"""Training recipes (package data)."""
