"""Backends for CPUs."""
