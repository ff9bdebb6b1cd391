"""Answers checked, groups admitted, rewards turned into advantages."""
