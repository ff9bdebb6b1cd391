"""Errors that a person can mend: the message gives rule, value and cure, and is shown without a traceback."""


class ConfigError(Exception):
    """A run file, an override or the machine it runs on does not fit."""


class DataError(Exception):
    """An input file does not fit; the message names the file and, for rows, the line."""


class RunError(Exception):
    """A run that was set up right cannot go on: what it needs stopped being true."""


class RunStop(Exception):
    """A signal ended the run between two steps, after its state was saved."""
