"""The update: solvers, schedules, and what an optimizer does with a direction."""
