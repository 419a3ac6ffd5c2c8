"""The version of dagexec, for whoever writes it down."""

VERSION = "0.1.0"
