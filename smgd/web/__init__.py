"""The HTTP side: server, gate, routes."""
