"""Which elements to send."""
