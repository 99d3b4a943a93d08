"""A request from arrival to report: its states, the steps in its slot, its outcome and its figures."""
