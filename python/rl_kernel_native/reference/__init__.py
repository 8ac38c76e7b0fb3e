"""Plain float64 references. Each reference defines an operator's result, not the method. References run only on
request."""
