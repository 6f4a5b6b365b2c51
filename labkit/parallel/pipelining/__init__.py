"""Runs a schedule on the ranks: stages, messages, microbatches, and the checks around them."""
