"""What happened, told in numbers and lines: metrics and logs."""
