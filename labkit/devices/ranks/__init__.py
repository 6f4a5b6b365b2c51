"""One process per device, driven from a notebook."""
