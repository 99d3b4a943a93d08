"""A request's own text, before any template: where each piece stands, and what in it comes and goes."""
