"""Records what ranks really execute, and times it on a modelled machine."""
