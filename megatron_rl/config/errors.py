"""The two errors a user's input can cause. Each message gives the rule, the value and the cure."""


class ConfigError(Exception):
    """A run file, an override or the machine it runs on does not fit."""


class DataError(Exception):
    """An input file does not fit; the message names the file and, for rows, the line."""
