"""What composer asks of the operating system: so far, the disk cache."""
