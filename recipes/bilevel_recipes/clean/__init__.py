"""Find wrong labels in a data set of your own, with the help of a few labels that were checked."""
