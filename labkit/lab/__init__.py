"""What a notebook shows: claims, predictions, results, pictures; and how it runs headless."""
