"""Which device holds which layers, by what each layer costs."""
