"""Advantage estimators: pure functions of gathered scores and group ids."""
