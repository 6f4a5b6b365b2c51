"""Which devices there are, what each may claim, and the ranks that run on them."""
