"""The format of the files that `POST /slots/N?action=save` writes: reading, cutting, dividing."""
