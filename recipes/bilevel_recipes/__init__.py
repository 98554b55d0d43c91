"""Recipes: complete programs on top of bilevel_plugin, and what they share (data, models, runs, plots, report)."""
