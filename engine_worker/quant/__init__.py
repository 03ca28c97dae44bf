"""Quantised tensor formats."""
