"""Plain float64 references. Each defines an operator's result, not its method. They run only on request."""
