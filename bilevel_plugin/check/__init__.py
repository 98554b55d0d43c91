"""Checks: derivatives against differences."""
