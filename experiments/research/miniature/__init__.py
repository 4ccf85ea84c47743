"""Miniatures: small models with the routing shapes of large ones, trained here and recorded."""
