"""The model: as a function of its weights, for one inner problem, for several, and on several ranks."""
