"""Several devices in one process, for lessons that place layers by hand."""
