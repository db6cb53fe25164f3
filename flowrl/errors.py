"""Errors that are the user's to mend; the command line prints them as one message, exit code 2."""

from __future__ import annotations


class UserError(ValueError):
    """Something in a config, a file or an argument is wrong; the message names it and what is legal."""
