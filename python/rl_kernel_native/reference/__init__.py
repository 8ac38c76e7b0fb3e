"""Plain float64 references: they define an operator's result, not its method. They run only on request."""
