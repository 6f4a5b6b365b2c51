"""What a layout would take and hold before anything runs, and which one to choose."""
