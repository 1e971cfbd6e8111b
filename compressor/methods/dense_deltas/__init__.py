"""Methods that train a scalar for every weight of the chosen matrices, at least at first."""
