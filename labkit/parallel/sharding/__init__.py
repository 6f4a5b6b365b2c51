"""Matrices, batches and training state divided over ranks, alone and combined with a pipeline."""
