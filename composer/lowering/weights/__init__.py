"""Takes weights into engines: by address, checked at each call, read again after a change."""
