"""Checks of the machine."""
