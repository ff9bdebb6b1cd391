"""What an engine can do wrong, as its clients see it."""


class EngineError(Exception):
    """An engine did not start, died, refused a request or gave no usable answer. The message names its URL."""
