"""A Flower app: handwritten digits, with compressed messages both ways."""
