"""The command line: serve, api, worker, chat, status."""

__version__ = "0.1.0"
