"""Errors that a user of the command line can mend."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field, or the nearest name."""
