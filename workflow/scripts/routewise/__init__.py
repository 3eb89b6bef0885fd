"""Routewise: does a batch give the same bits as one token alone, where not, and at what price."""
