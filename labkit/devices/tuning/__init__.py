"""Clocks, fans and power: changed within bounds, and always put back."""
