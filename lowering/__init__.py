"""Implements the ``kvpass::*`` ops, and selects an implementation for each call (`kvpass.lowering.table`)."""
