"""The admin port and the dashboard."""
