"""The lab's transformer, its configuration and the text it learns from."""
