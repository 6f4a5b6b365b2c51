"""Everything that spreads a model over devices."""
