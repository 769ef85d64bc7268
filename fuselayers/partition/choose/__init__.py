"""Choose which values are saved between forward and backward, and at which prices."""
