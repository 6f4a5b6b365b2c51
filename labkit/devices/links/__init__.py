"""What a link between two devices takes, and whether what is sent over it arrives."""
