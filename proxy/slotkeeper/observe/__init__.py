"""What happened, told in numbers and lines, in spans and in recordings."""
