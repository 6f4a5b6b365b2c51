"""What the devices' own meters show while a program runs."""
