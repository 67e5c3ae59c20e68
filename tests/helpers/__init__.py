"""What several test files use, and the plugins and programs of the suite."""
