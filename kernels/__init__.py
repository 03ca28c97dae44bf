"""The op table and its backends. Imports nothing else of ours."""
