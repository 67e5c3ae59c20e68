"""What is possible: the limits that every codec is measured against."""
