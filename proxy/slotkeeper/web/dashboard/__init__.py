"""The dashboard: one page of the admin port, made of plain files. It asks the API that anybody can ask."""
