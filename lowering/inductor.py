"""Formulations written so that Inductor fuses them."""
