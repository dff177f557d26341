"""Anchor-free head without objectness, with task-aligned assignment."""
