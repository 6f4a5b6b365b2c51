"""Text generation with a KV cache on one device, split over several, and for many requests."""
