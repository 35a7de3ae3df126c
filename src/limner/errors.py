"""The one exception that a user's mistake raises.

The command line prints its text as one sentence and exits with code 2 (`--debug` shows the traceback).
"""


class UserError(Exception):
    """A mistake the user can mend. The message says what is wrong, where, and how to mend it."""
