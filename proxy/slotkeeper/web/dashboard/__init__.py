"""The dashboard: one page of the admin port, made of plain files. It uses the public API."""
