"""What is given up, step by step, when there is more to do than the engines can: a declared ladder, with hysteresis."""
