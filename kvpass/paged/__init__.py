"""Paged attention: packed pages in the blocks of a server, and the step of a batch of requests over them."""
